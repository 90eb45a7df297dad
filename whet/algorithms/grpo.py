"""GRPO (arXiv 2402.03300) and, by its settings, its family: the reward of an answer is compared with those of the other
answers to the same task, and the policy moves towards the better ones. No critic."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.base import Algorithm
from whet.config import Component
from whet.losses.base import Unit
from whet.losses.registry import LOSSES
from whet.rollouts.filters import FILTERS, Filter

if TYPE_CHECKING:
    from whet.algorithms.credit import AdvantageEstimator
    from whet.losses.base import Loss


class GRPO(Algorithm):
    """Group-relative policy optimisation."""

    units: ClassVar[tuple[Unit, ...]] = ("token", "sequence")

    group_size: int = Field(8, gt=1)
    """Answers per task."""
    advantage: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] = "group"
    """How rewards become advantages."""
    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = "policy"
    """What is minimised."""
    filters: tuple[Annotated[Filter, Component(FILTERS)], ...] = ()
    """What happens to groups between grading and learning."""

    @property
    def samples_per_task(self) -> int:
        return self.group_size

    @property
    def losses(self) -> "dict[str, Loss]":
        return {"policy": self.loss}

    @property
    def estimator(self) -> "AdvantageEstimator":
        return self.advantage

    @property
    def group_filters(self) -> tuple[Filter, ...]:
        return self.filters
