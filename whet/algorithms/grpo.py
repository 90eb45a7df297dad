"""GRPO (arXiv 2402.03300) and, through its settings, its family: the reward of an answer is compared with the rewards
of the other answers to the same task, and the policy moves towards the better ones. There is no critic.

    A = (r - mean of the group's r) / (std of the group's r + eps)               GroupAdvantage, for each answer
    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)                 PPOClip, for each of its tokens
    rho = exp(lp - lp_old), lp the log-prob of a token, lp_old the same at the start of the step

What this simplifies. Every token of an answer gets the same advantage, because we have no critic to say which token
deserved it: an answer that goes wrong in its last line is pushed down from its first. Dividing by the standard
deviation makes nearly solved and nearly hopeless tasks count as much as balanced ones; that is the paper's choice, and
``divide_by_std: false`` undoes it. We leave out the paper's KL term, as most people who train on verifiable rewards now
do; set ``loss.kl`` if you want it. We average the loss over tokens, as DAPO does, and not over answers. And a group
whose answers all got the same reward teaches nothing: the learner skips it, but we have already paid for sampling it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from whet.algorithms.advantage import Advantage, Credit, Std, divided, finite_rewards, group_centred, group_std
from whet.algorithms.base import POLICY, OnlineAlgorithm, Role
from whet.algorithms.registry import AnyAdvantage, AnyLoss
from whet.core.batch import Batch
from whet.losses.composite import PolicyLoss
from whet.losses.policy_gradient import PPOClip


class GroupAdvantage(Advantage):
    """Reward minus the group's baseline (GRPO, arXiv 2402.03300; with ``leave_one_out`` RLOO, arXiv 2402.14740; without
    the division Dr. GRPO, arXiv 2503.20783). A group of one has advantage 0."""

    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    divide_by_std: bool = True
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def compares(self) -> bool:
        return True

    def idle(self) -> Iterator[tuple[str, str]]:
        if not self.divide_by_std:
            yield from self._unused("std eps", "divide_by_std = true")

    def estimate(self, batch: Batch) -> Credit:
        """Raises DataError for a reward that isn't finite."""
        rewards_S = finite_rewards(batch, batch.reward)
        centred_S, members_S = group_centred(batch, rewards_S)
        advantages_S = centred_S
        if self.baseline == "leave_one_out":
            # r - (sum - r) / (n - 1), written with the mean
            advantages_S = centred_S * members_S / (members_S - 1).clamp(min=1)
        if self.divide_by_std:
            advantages_S = divided(advantages_S, group_std(batch, centred_S, members_S, self.std) + self.eps)
        return Credit(advantages_S, axis="sequence")


class GRPO(OnlineAlgorithm):
    """Group-relative policy optimisation."""

    group_size: int = Field(8, gt=1)
    """Answers per task."""
    advantage: AnyAdvantage = GroupAdvantage()
    """The estimator that turns rewards into advantages."""
    loss: AnyLoss = PolicyLoss(surrogate=PPOClip(clip_low=0.2, clip_high=0.2))
    """The loss of the policy."""

    @property
    def roles(self) -> dict[str, Role]:
        return {"policy": Role(loss=self.loss, fills=POLICY)}

    @property
    def estimator(self) -> Advantage:
        return self.advantage
