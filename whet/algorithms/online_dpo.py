"""Online DPO (arXiv 2402.04792): the policy answers each task several times, its best and its worst answer by reward
become a pair, and DPO learns from the pair, measured from the model that the run started from."""

from typing import ClassVar

from pydantic import Field

from whet.algorithms.base import POLICY, OnlineAlgorithm, Role
from whet.algorithms.parts import AnyFilter, AnyLoss
from whet.core.types import Weighting
from whet.losses.base import Unit
from whet.losses.preference import DPOLoss
from whet.rollouts.filters import BestAndWorst, Filter


class OnlineDPO(OnlineAlgorithm):
    """DPO on the policy's own answers. A task whose answers are all worth the same is dropped, and another is drawn."""

    units: ClassVar[tuple[Unit, ...]] = ("group",)

    group_size: int = Field(8, gt=1)
    """Answers per task, of which two are learned from."""
    loss: AnyLoss = DPOLoss()
    """``dpo``, ``simpo`` or ``orpo``, with their settings."""
    filters: tuple[AnyFilter, ...] = ()
    """What happens to groups before the pair is chosen."""
    weighting: Weighting = "group"
    """A token's share of a step."""

    @property
    def roles(self) -> dict[str, Role]:
        return {"policy": Role(loss=self.loss, fills=POLICY)}

    @property
    def pairing(self) -> tuple[Filter, ...]:
        return (BestAndWorst(),)
