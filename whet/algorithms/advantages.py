"""From the rewards of sequences to the advantages of tokens, in float64, over the whole step.

Groups are known by the batch's group index. Sequences without a trained token receive nothing but count in their
group's baseline. Rewards that are all equal give exactly 0, whatever the rounding of their mean.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.algorithms.credit import Credit
from whet.batch import Batch
from whet.config import Config
from whet.errors import DataError
from whet.lazy import Tensor, torch
from whet.losses.kl import KL

Std = Literal["sample", "population"]


class GroupAdvantage(Config):
    """Reward minus the group's baseline (GRPO, arXiv 2402.03300; ``leave_one_out``: RLOO, arXiv 2402.14740; without
    the division: Dr. GRPO, arXiv 2503.20783). A group of one has advantage 0."""

    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    divide_by_std: bool = True
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, batch: Batch) -> Credit:
        """Raises DataError for a reward that isn't finite."""
        rewards = finite_rewards(batch, batch.reward, "reward")
        advantages, members = group_centred(batch, rewards)
        if self.divide_by_std:
            spread = _group_std(batch, advantages, members, self.std) + self.eps
        else:
            spread = torch.ones_like(advantages)
        if self.baseline == "leave_one_out":
            # r - (sum - r) / (n - 1), written with the mean
            advantages = advantages * members / (members - 1).clamp(min=1)
        return Credit(batch.per_token(_divided(advantages, spread)))


class ReinforcePlusPlus(Config):
    """Reward, optionally minus the group's mean, whitened over the tokens of the step (arXiv 2501.03262)."""

    group_baseline: bool = False
    kl: KL | None = None
    """A penalty inside the reward: each token also pays for the divergence from it on to the end."""
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def reads(self) -> frozenset[str]:
        return _needs_of_penalty(self.kl)

    def __call__(self, batch: Batch) -> Credit:
        """Raises DataError for a reward that isn't finite."""
        rewards = finite_rewards(batch, batch.reward, "reward")
        if self.group_baseline:
            rewards, _ = group_centred(batch, rewards)
        steps = Steps(batch)
        to_go = steps.scan(steps.rewards(rewards, self.kl), torch.ones_like(rewards))
        return Credit(_whitened_tokens(batch, steps.tokens(to_go), self.std, self.eps))


class GDPO(Config):
    """Each reward component normalised within its group, weighted, summed, then whitened over the sequences of the
    step, so that no component drowns the others (arXiv 2601.05242)."""

    components: dict[str, float] = Field(min_length=1)
    """Name of a score -> weight."""
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, batch: Batch) -> Credit:
        """Raises DataError for a component that is missing or not finite."""
        total = torch.zeros_like(batch.reward, dtype=torch.float64)
        for name, weight in self.components.items():
            scores = finite_rewards(batch, batch.score(name), f"reward component {name!r}")
            centred, members = group_centred(batch, scores)
            total = total + weight * _divided(centred, _group_std(batch, centred, members, self.std) + self.eps)
        return Credit(batch.per_token(_whitened(total, self.std, self.eps)))


class GAE(Config):
    """Generalised advantage estimation (arXiv 1506.02438) over trained tokens only; what stands between them (tool
    results, users) is skipped. The reward arrives at the last trained token.

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
    """A truncated episode goes on with the value of its last trained token, the nearest one known, instead of 0."""
    whiten: bool = False
    """Advantages, over the tokens of the step."""
    kl: KL | None = None
    """A penalty inside the reward, at each token."""
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def reads(self) -> frozenset[str]:
        return _needs_of_penalty(self.kl) | {"values"}

    def __call__(self, batch: Batch) -> Credit:
        """Returns = advantages under the critic's lambda + values. Raises DataError for a reward that isn't finite."""
        rewards = finite_rewards(batch, batch.reward, "reward")
        steps = Steps(batch)
        values = steps.of(batch.column("values").double())
        after_end = values[:1] * (batch.truncated & self.bootstrap_truncated)
        following = torch.cat([after_end, values[:-1]])
        delta = steps.rewards(rewards, self.kl) + self.gamma * following - values

        lam = torch.full_like(rewards, self.policy_lambda)
        if self.length_adaptive is not None:
            lam = (1 - 1 / (self.length_adaptive * batch.trained_per_sequence.double())).clamp(min=0)
        critic_lam = lam if self.critic_lambda is None else torch.full_like(rewards, self.critic_lambda)
        advantages = steps.tokens(steps.scan(delta, self.gamma * lam))
        returns = steps.tokens(steps.scan(delta, self.gamma * critic_lam) + values)
        if self.whiten:
            advantages = _whitened_tokens(batch, advantages, self.std, self.eps)
        return Credit(advantages, returns)


class Steps:
    """The trained tokens of each sequence as columns of a [T, S] matrix, the last token first: row 0 holds each
    sequence's last trained token, and going down the rows is going back in time. Rows past a sequence's first token
    hold 0."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.token = batch.trained.nonzero().squeeze(1)
        sequence = batch.sequence[self.token]
        order = torch.argsort(sequence, stable=True)
        self.token, self.sequence = self.token[order], sequence[order]
        self.length = batch.trained_per_sequence
        last = self.length.cumsum(0)[self.sequence] - 1
        self.back = last - torch.arange(self.token.numel())

    def of(self, column: Tensor) -> Tensor:
        """[N] -> [T, S]"""
        steps = max([1, *self.length.tolist()])
        matrix = column.new_zeros(steps, self.batch.sequences)
        matrix[self.back, self.sequence] = column[self.token]
        return matrix

    def tokens(self, matrix: Tensor) -> Tensor:
        """[T, S] -> [N], 0 at untrained tokens"""
        column = matrix.new_zeros(len(self.batch))
        column[self.token] = matrix[self.back, self.sequence]
        return column

    def rewards(self, rewards: Tensor, penalty: KL | None) -> Tensor:
        """Reward at each step: the sequence's at the last one, minus the penalty of each token. [S] -> [T, S]"""
        batch = self.batch
        if penalty is None:
            paid = torch.zeros(len(batch), dtype=torch.float64)
        else:
            old = batch.column("old_logprobs").double()
            reference = batch.column("reference_logprobs")
            paid = penalty.coefficient * penalty.estimate(old, reference)
        matrix = -self.of(paid)
        matrix[0] += rewards
        return matrix

    @staticmethod
    def scan(matrix: Tensor, decay: Tensor) -> Tensor:
        """x_k = m_k + decay * x_(k-1) down the rows. [T, S], [S] -> [T, S]"""
        result, running = torch.empty_like(matrix), torch.zeros_like(decay)
        for step, row in enumerate(matrix):
            running = row + decay * running
            result[step] = running
        return result


def group_sums(batch: Batch, values: Tensor) -> Tensor:
    """Sums over each sequence's group. [S] -> [S]"""
    return values.new_zeros(len(batch.group_uids)).index_add(0, batch.group, values)[batch.group]


def group_centred(batch: Batch, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Reward minus the group's mean, exactly 0 where all are equal; and the size of the group. [S] each"""
    members = group_sums(batch, torch.ones_like(rewards))
    groups = rewards.new_zeros(len(batch.group_uids))
    high = groups.scatter_reduce(0, batch.group, rewards, "amax", include_self=False)
    low = groups.scatter_reduce(0, batch.group, rewards, "amin", include_self=False)
    equal = (high == low)[batch.group]
    return (rewards - group_sums(batch, rewards) / members).masked_fill(equal, 0.0), members


def _group_std(batch: Batch, centred: Tensor, members: Tensor, std: Std) -> Tensor:
    """Spread of each sequence's group, from rewards minus their mean; nan for a sample of one. [S] -> [S]"""
    return (group_sums(batch, centred.square()) / (members - int(std == "sample"))).sqrt()


def _divided(values: Tensor, spread: Tensor) -> Tensor:
    """values / spread, and 0 where the value is 0 whatever the spread."""
    return torch.where(values == 0, 0.0, values / spread)


def _whitened(values: Tensor, std: Std, eps: float) -> Tensor:
    """(x - mean) / (std + eps), exactly 0 where all are equal. [n] -> [n]"""
    if values.numel() == 0 or values.max() == values.min():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std(correction=int(std == "sample")) + eps)


def _whitened_tokens(batch: Batch, advantages: Tensor, std: Std, eps: float) -> Tensor:
    """The same over trained tokens only. [N] -> [N]"""
    whitened = torch.zeros_like(advantages)
    whitened[batch.trained] = _whitened(advantages[batch.trained], std, eps)
    return whitened


def finite_rewards(batch: Batch, rewards: Tensor, what: str) -> Tensor:
    bad = (~rewards.isfinite()).nonzero().squeeze(1).tolist()
    if bad:
        uid = batch.group_uids[int(batch.group[bad[0]])]
        raise DataError(
            f"group {uid!r}: the {what} is {rewards[bad[0]].item()} ({len(bad)} such sequences in this step); "
            "rewards must be finite numbers: fix the grader, or let failed episodes be dropped instead of scored"
        )
    return rewards


def _needs_of_penalty(penalty: KL | None) -> frozenset[str]:
    return frozenset() if penalty is None else penalty.reads | {"old_logprobs"}
