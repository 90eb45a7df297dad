"""What a teacher thinks of each sampled token, as an advantage: for policy losses, several epochs of them too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.credit import Credit
from whet.batch import Batch
from whet.config import Component, Config
from whet.losses.weighted import at_trained


class TeacherAdvantage(Config):
    """A = weight x (lp_teacher - lp_old) + the advantage of the task's reward, where one is asked for (Lu, "On-Policy
    Distillation", 2025). Each token is judged for itself; no later one counts."""

    weight: float = Field(1.0, gt=0)
    """Of the teacher's part."""
    clamp: float = Field(10.0, gt=0)
    """Bound of |lp_teacher - lp_old|."""
    reward: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] | None = None
    """How the task's rewards become the other part; None: they don't count."""

    @property
    def reads(self) -> frozenset[str]:
        own = frozenset({"teacher_token_logprobs", "old_logprobs"})
        return own if self.reward is None else own | self.reward.reads

    def __call__(self, batch: Batch) -> Credit:
        """Returns are the reward's. Raises DataError as its advantage does."""
        teacher = at_trained(batch, batch.column("teacher_token_logprobs")).double()
        old = at_trained(batch, batch.column("old_logprobs"))
        advantages = self.weight * (teacher - old).clamp(-self.clamp, self.clamp)
        if self.reward is None:
            return Credit(advantages)
        of_reward = self.reward(batch)
        return Credit(advantages + of_reward.advantages, of_reward.returns)
