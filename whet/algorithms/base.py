"""What an algorithm is: which losses train which role, how rewards become advantages, what is filtered. A frozen config
without a loop: there is one loop, in ``train.py``."""

from typing import TYPE_CHECKING

from pydantic import Field

from whet.config import Config
from whet.rollouts.filters import Filter

if TYPE_CHECKING:
    from whet.algorithms.credit import AdvantageEstimator
    from whet.batch import Batch
    from whet.losses.base import Loss


class Algorithm(Config):
    """Base of all algorithms."""

    epochs: int = Field(1, gt=0)
    """How often each step's rollouts are learned from."""
    minibatches: int = Field(1, gt=0)
    """Optimizer steps per epoch; the step's groups are split among them."""

    @property
    def samples_per_task(self) -> int:
        """Samples per task; 0 for algorithms that learn from a data set."""
        return 0

    @property
    def losses(self) -> "dict[str, Loss]":
        """What trains each role, e.g. ``{"policy": ..., "critic": ...}``."""
        raise NotImplementedError

    @property
    def estimator(self) -> "AdvantageEstimator | None":
        return None

    @property
    def group_filters(self) -> tuple[Filter, ...]:
        return ()

    @property
    def on_policy(self) -> bool:
        """One optimizer step per rollout: then the old log-probs are the current ones and no pass computes them."""
        return self.epochs * self.minibatches == 1

    def weigh(self, batch: "Batch", max_new_tokens: int) -> "Batch":
        """The batch with each token's share of the optimizer step."""
        raise NotImplementedError

    @property
    def fills(self) -> frozenset[str]:
        """What losses and advantages may need: columns that somebody fills, and outputs of the model."""
        values = {"values"} if "critic" in self.losses else set[str]()
        return frozenset({"advantages", "rollout_logprobs", "old_logprobs", "reference_logprobs", "entropy", *values})

    @property
    def needs(self) -> frozenset[str]:
        """The columns that must be filled before the losses run."""
        needs = frozenset[str]().union(*(loss.needs for loss in self.losses.values()))
        if self.estimator is not None:
            needs |= self.estimator.needs
        return needs if self.on_policy else needs | {"old_logprobs"}
