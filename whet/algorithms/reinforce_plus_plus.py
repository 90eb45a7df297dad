"""REINFORCE++ (arXiv 2501.03262): PPO's clip without a critic; rewards are normalised over the whole step instead of
within their group. The preset ``reinforce_plus_plus`` is the variant for several answers per task."""

from __future__ import annotations

from pydantic import Field

from whet.algorithms.advantage import (
    Advantage,
    Credit,
    Std,
    Steps,
    finite_rewards,
    group_centred,
    reads_of,
    whitened_tokens,
)
from whet.base.lazy import torch
from whet.core.batch import Batch
from whet.losses.kl import KL


class ReinforcePlusPlusAdvantage(Advantage):
    """Reward, optionally minus the group's mean, whitened over the tokens of the step (arXiv 2501.03262)."""

    group_baseline: bool = False
    kl: KL | None = None
    """A penalty inside the reward: each token's return includes the penalties of all tokens from it to the end."""
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def reads(self) -> frozenset[str]:
        return reads_of(self.kl)

    @property
    def compares(self) -> bool:
        return self.group_baseline

    def estimate(self, batch: Batch) -> Credit:
        """Raises DataError for a reward that isn't finite."""
        rewards_S = finite_rewards(batch, batch.reward)
        if self.group_baseline:
            rewards_S, _ = group_centred(batch, rewards_S)
        steps = Steps(batch)
        to_go_TS = steps.scan(steps.rewards(rewards_S, self.kl), torch.ones_like(rewards_S))
        return Credit(whitened_tokens(batch, steps.tokens(to_go_TS), self.std, self.eps))
