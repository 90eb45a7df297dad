"""PPO (arXiv 1707.06347) for language models: a second model, the critic, learns what a token is worth, and advantages
are how much better it went (GAE, arXiv 1506.02438). Several epochs and minibatches per rollout, both models clipped."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.base import Head
from whet.algorithms.grpo import GRPO
from whet.config import Component
from whet.learner.config import OptimizerConfig
from whet.losses.registry import LOSSES
from whet.metrics import Metrics

if TYPE_CHECKING:
    from whet.batch import Batch
    from whet.losses.base import Loss


class PPO(GRPO):
    """A policy and a critic. The critic starts from the same weights, with a scalar head of its own."""

    heads: ClassVar[dict[str, Head]] = {"policy": "language", "critic": "value"}

    group_size: int = Field(1, gt=0)
    """Answers per task; one is enough, because no group is compared."""
    advantage: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] = Field(
        default={"type": "gae", "whiten": True}
    )
    value_loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(default="value")
    """What the critic minimises."""
    critic_lr: float | None = Field(None, ge=0)
    """The critic's learning rate; by default that of the policy."""
    critic_warmup: int = Field(0, ge=0)
    """For so many steps only the critic learns: advantages of a critic that knows nothing are noise."""
    epochs: int = Field(2, gt=0)
    minibatches: int = Field(4, gt=0)

    @property
    def losses(self) -> "dict[str, Loss]":
        return {"policy": self.loss, "critic": self.value_loss}

    def losses_at(self, step: int) -> "dict[str, Loss]":
        return self.losses if step >= self.critic_warmup else {"critic": self.value_loss}

    def optimizer(self, role: str, shared: OptimizerConfig) -> OptimizerConfig:
        if role != "critic" or self.critic_lr is None:
            return shared
        return shared.model_copy(update={"lr": self.critic_lr})

    def updates(self, role: str, steps: int) -> int:
        idle = self.critic_warmup if role == "policy" else 0
        return super().updates(role, max(1, steps - idle))

    def report(self, batch: "Batch") -> Metrics:
        from whet.losses.value import explained_variance

        if batch.values is None or batch.returns is None:
            return Metrics()
        return explained_variance(batch.values, batch.returns, batch)
