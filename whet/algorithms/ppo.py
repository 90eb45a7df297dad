"""PPO (arXiv 1707.06347) for language models: a second model, the critic, predicts the return at each token, and the
advantage is how much better the answer turned out (GAE, arXiv 1506.02438). It trains for several epochs and minibatches
per rollout, with both models clipped.

    delta_t = r_t + gamma V_(t+1) - V_t
    A_t = delta_t + gamma lambda A_(t+1)                                GAE, over the trained tokens of an answer
    policy: -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)       PPOClip
    critic: 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)   ValueLoss, R = A + V
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from whet.algorithms.advantage import Advantage, Credit, Std, Steps, finite_rewards, reads_of, whitened_tokens
from whet.algorithms.base import POLICY, OnlineAlgorithm, Role
from whet.algorithms.registry import AnyAdvantage, AnyLoss
from whet.base.lazy import torch
from whet.core.batch import Batch
from whet.core.types import Group
from whet.losses.composite import PolicyLoss
from whet.losses.kl import KL
from whet.losses.value import ValueLoss, explained_variance
from whet.metrics import Metrics
from whet.processes.compute import compute

if TYPE_CHECKING:
    from whet.learner.base import Scorer


class GAE(Advantage):
    """Generalised advantage estimation (arXiv 1506.02438) over trained tokens only; tokens between them (tool results,
    user messages) are skipped. What a reply earns is placed at its last token, the rest at the last token of each
    branch.

    VAPO (arXiv 2504.05118): ``critic_lambda: 1`` decouples the critic's targets from the policy's advantages, and
    ``length_adaptive: 0.05`` makes the policy's lambda 1 - 1 / (0.05 x length).
    """

    gamma: float = Field(1.0, ge=0, le=1)
    policy_lambda: float = Field(0.95, ge=0, le=1)
    critic_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda of the returns; None: the policy's."""
    length_adaptive: float | None = Field(None, gt=0)
    """VAPO's alpha; replaces ``policy_lambda`` by max(0, 1 - 1 / (alpha x trained tokens of the sequence))."""
    bootstrap_truncated: bool = False
    """Continue a truncated episode with the value of its last trained token, the nearest one available, instead of
    0."""
    whiten: bool = False
    """Whiten the advantages over the tokens of the step."""
    kl: KL | None = None
    """A penalty inside the reward, at each token."""
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def reads(self) -> frozenset[str]:
        return reads_of(self.kl) | {"values"}

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"advantages", "returns"})

    def idle(self) -> Iterator[tuple[str, str]]:
        if not self.whiten:
            yield from self._unused("std eps", "whiten = true")
        if self.length_adaptive is not None:
            yield from self._unused("policy_lambda", "length_adaptive is not set")

    def estimate(self, batch: Batch) -> Credit:
        """Returns = advantages under the critic's lambda + values. Raises DataError for a reward that isn't finite."""
        rewards_S = finite_rewards(batch, batch.reward)
        steps = Steps(batch)
        values_TS = steps.of(batch.column("values").double())
        after_end_S = values_TS[:1] * (batch.truncated & self.bootstrap_truncated)
        next_TS = torch.cat([after_end_S, values_TS[:-1]])
        delta_TS = steps.rewards(rewards_S, self.kl) + self.gamma * next_TS - values_TS

        lambda_S = torch.full_like(rewards_S, self.policy_lambda)
        if self.length_adaptive is not None:
            lambda_S = (1 - 1 / (self.length_adaptive * batch.trained_per_sequence.double())).clamp(min=0)
        critic_S = lambda_S if self.critic_lambda is None else torch.full_like(rewards_S, self.critic_lambda)
        advantages_N = steps.tokens(steps.scan(delta_TS, self.gamma * lambda_S))
        returns_N = steps.tokens(steps.scan(delta_TS, self.gamma * critic_S) + values_TS)
        if self.whiten:
            advantages_N = whitened_tokens(batch, advantages_N, self.std, self.eps)
        return Credit(advantages_N, returns_N)


class PPO(OnlineAlgorithm):
    """A policy and a critic. The critic starts from the same weights, with a new scalar head."""

    group_size: int = Field(1, gt=0)
    """Answers per task; one is enough, because answers are not compared within a group."""
    advantage: AnyAdvantage = GAE(whiten=True)
    """The estimator that turns rewards into advantages."""
    loss: AnyLoss = PolicyLoss()
    """The loss of the policy."""
    value_loss: AnyLoss = ValueLoss()
    """The loss of the critic."""
    critic_lr: float | None = Field(None, ge=0)
    """The critic's learning rate; by default the policy's."""
    critic_warmup: int = Field(0, ge=0)
    """Number of first steps in which only the critic is trained, because the advantages of an untrained critic are
    noise."""
    epochs: int = Field(2, gt=0)
    """Number of times that each step's groups are trained on."""
    minibatches: int = Field(4, gt=0)
    """Optimizer steps per epoch; the step's groups are split among them."""

    @property
    def roles(self) -> dict[str, Role]:
        critic = Role(
            loss=self.value_loss, key="value_loss", head="value", fills={"values": "values"}, lr=self.critic_lr
        )
        return {"policy": Role(loss=self.loss, fills=POLICY, starts_at=self.critic_warmup), "critic": critic}

    @property
    def estimator(self) -> Advantage:
        return self.advantage

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Scorer]) -> Metrics:
        metrics = await super().prepare(batch, groups, learners)
        if batch.returns is None:
            return metrics
        return metrics.merge(await compute(explained_variance, batch.column("values"), batch.returns, batch))
