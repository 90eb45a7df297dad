"""MaxRL (arXiv 2602.02710): the reward of an answer is compared with its group's mean and divided by it, so that a task
that is rarely solved counts as much as in maximum likelihood."""

from __future__ import annotations

from pydantic import Field

from whet.algorithms.advantage import Advantage, Credit, divided, finite_rewards, group_centred
from whet.base.errors import DataError
from whet.core.batch import Batch


class MaxRLAdvantage(Advantage):
    """(r - group mean) / (group mean + eps), for rewards that are not negative (arXiv 2602.02710)."""

    eps: float = Field(1e-6, ge=0)

    @property
    def compares(self) -> bool:
        return True

    def estimate(self, batch: Batch) -> Credit:
        """Raises DataError for a reward that is negative or not finite."""
        rewards_S = finite_rewards(batch, batch.reward)
        if (rewards_S < 0).any():
            uid = batch.group_uids[int(batch.group[int((rewards_S < 0).nonzero()[0])])]
            raise DataError(
                f"group {uid!r}: the reward is {rewards_S.min().item():g}, but max_rl divides by the mean reward, so "
                "rewards must not be negative; shift them, or choose another advantage"
            )
        centred_S, _ = group_centred(batch, rewards_S)
        return Credit(divided(centred_S, rewards_S - centred_S + self.eps), axis="sequence")
