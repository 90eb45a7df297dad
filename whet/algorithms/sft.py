"""Supervised fine-tuning on given replies. ``data.train_on`` sets which messages are trained."""

from typing import ClassVar

from whet.algorithms.base import POLICY, Algorithm, Role
from whet.algorithms.registry import AnyLoss
from whet.data.base import Data
from whet.data.rows import SupervisedRows
from whet.losses.base import Unit
from whet.losses.sft import SFTLoss


class SFT(Algorithm):
    """Mean -log p over the step's trained tokens."""

    takes: ClassVar[tuple[type[Data], ...]] = (SupervisedRows,)
    units: ClassVar[tuple[Unit, ...]] = ("token", "sequence")

    loss: AnyLoss = SFTLoss()
    """The loss of the policy."""

    @property
    def roles(self) -> dict[str, Role]:
        return {"policy": Role(loss=self.loss, fills=POLICY)}
