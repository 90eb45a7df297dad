"""Supervised fine-tuning: the given replies become likely. Which messages train is ``data.train_on``."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from whet.algorithms.base import Algorithm
from whet.config import Component
from whet.data.base import Data
from whet.data.examples import SupervisedRows
from whet.losses.base import Unit
from whet.losses.registry import LOSSES

if TYPE_CHECKING:
    from whet.losses.base import Loss


class SFT(Algorithm):
    """Mean -log p over the step's trained tokens."""

    takes: ClassVar[tuple[type[Data], ...]] = (SupervisedRows,)
    units: ClassVar[tuple[Unit, ...]] = ("token", "sequence")

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="sft")
    """What is minimised."""

    @property
    def losses(self) -> "dict[str, Loss]":
        return {"policy": self.loss}
