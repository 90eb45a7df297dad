"""Online DPO (arXiv 2402.04792): the policy answers each task several times, its best and its worst answer by reward
become a pair, and DPO learns from the pair, measured from the model that the run started from."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from whet.algorithms.base import Algorithm
from whet.config import Component
from whet.losses.base import Unit
from whet.losses.registry import LOSSES
from whet.rollouts.filters import FILTERS, BestAndWorst, Filter
from whet.types import Weighting

if TYPE_CHECKING:
    from whet.losses.base import Loss


class OnlineDPO(Algorithm):
    """DPO on the policy's own answers. A task whose answers are all worth the same is dropped, and another is drawn."""

    units: ClassVar[tuple[Unit, ...]] = ("group",)

    group_size: int = Field(8, gt=1)
    """Answers per task, of which two are learned from."""
    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="dpo")
    """``dpo``, ``simpo`` or ``orpo``, with their settings."""
    filters: tuple[Annotated[Filter, Component(FILTERS)], ...] = ()
    """What happens to groups before the pair is chosen."""
    weighting: Weighting = "group"

    @property
    def samples_per_task(self) -> int:
        return self.group_size

    @property
    def losses(self) -> "dict[str, Loss]":
        return {"policy": self.loss}

    @property
    def group_filters(self) -> tuple[Filter, ...]:
        return (*self.filters, BestAndWorst())
