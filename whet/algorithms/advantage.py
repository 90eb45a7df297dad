"""Advantage estimators, which turn the rewards of sequences into advantages of tokens: the interface and the arithmetic
that they share. All in float64, over the whole step.

Groups are identified by the batch's group index. An episode counts once, however many branches it has, even if none of
its tokens is trained. Rewards that are all equal give exactly 0, regardless of how their mean is rounded.

Suffixes: N tokens, S sequences, T steps (trained tokens of a sequence, the last one first).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from whet.base.errors import DataError, naming
from whet.base.lazy import Tensor, torch
from whet.config import Config
from whet.core.batch import Axis, Batch
from whet.core.in_place import unchanged
from whet.losses.kl import KL
from whet.processes.user_code import place_of, place_of_user

Std = Literal["sample", "population"]


@dataclass(slots=True)
class Credit:
    """The columns that an estimator fills; 0 at untrained tokens."""

    advantages: Tensor  # [N] float64; [S] if ``axis`` is "sequence": one number for all trained tokens of an answer
    returns: Tensor | None = None  # [N] float64; the critic's targets
    axis: Axis = "token"  # of the advantages

    def per_token(self, batch: Batch) -> Tensor:
        """The advantages of all tokens, [N]."""
        return self.advantages if self.axis == "token" else batch.per_token(self.advantages)

    def fill(self, batch: Batch) -> None:
        """Write the columns into the batch."""
        batch.fill("advantages", self.advantages, self.axis)
        batch.returns = None
        if self.returns is not None:
            batch.fill("returns", self.returns)


class Advantage(Config, ABC):
    """Base of the estimators: a frozen config applied to the batch of a whole step, before it is split."""

    @property
    def reads(self) -> frozenset[str]:
        """The columns that must be filled first (``values``, ``reference_logprobs``, a column that you added)."""
        return frozenset()

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"advantages"})

    @property
    def compares(self) -> bool:
        """True if an answer is compared with the other answers to its task, so that groups need several."""
        return False

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yield each setting that was changed but has no effect with the other settings, and the condition under which
        it has one."""
        yield from ()

    def _unused(self, names: str, when: str) -> Iterator[tuple[str, str]]:
        yield from ((name, when) for name in self.changed(names.split()))

    @abstractmethod
    def estimate(self, batch: Batch) -> Credit:
        """Return the advantages of the trained tokens of a whole step."""

    def credit(self, batch: Batch) -> Credit:
        """Return ``estimate(batch)``. Raises ``DataError`` if that is anything but one finite number for each trained
        token or its sequence, or if the batch was changed."""
        where = place_of(type(self), "estimate")
        with unchanged(batch, where), naming(place_of_user(type(self), "estimate")):
            credit: object = self.estimate(batch)
        if not isinstance(credit, Credit):
            what = "None" if credit is None else f"a {type(credit).__name__}"
            raise DataError(f"{where} must return Credit(advantages), not {what}")
        try:
            credit.fill(replace(batch))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        wrong = batch.trained & ~credit.per_token(batch).isfinite()
        if wrong.any():
            uid = batch.group_uids[int(batch.group[batch.sequence[wrong.nonzero()[0]]])]
            raise DataError(
                f"{where}: the advantages of group {uid!r} are not finite: a division by a spread of 0, perhaps, where "
                "all rewards are equal"
            )
        return credit

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with its advantages (and returns) filled."""
        filled = replace(batch)
        self.credit(filled).fill(filled)
        return filled


class Steps:
    """The trained tokens of each sequence as columns of a [T, S] matrix, the last token first: row 0 holds each
    sequence's last trained token, and each further row is one token earlier. Rows before a sequence's first token hold
    0."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.token = batch.trained_tokens
        self.sequence = batch.sequence[self.token]
        self.length = batch.trained_per_sequence
        last = self.length.cumsum(0)[self.sequence] - 1
        self.back = last - torch.arange(self.token.numel())

    def of(self, column: Tensor) -> Tensor:
        """Return the column as a matrix. [N] -> [T, S]"""
        steps = max([1, *self.length.tolist()])
        matrix = column.new_zeros(steps, self.batch.sequences)
        matrix[self.back, self.sequence] = column[self.token]
        return matrix

    def tokens(self, matrix: Tensor) -> Tensor:
        """Return the matrix as a column, 0 at untrained tokens. [T, S] -> [N]"""
        column = matrix.new_zeros(len(self.batch))
        column[self.token] = matrix[self.back, self.sequence]
        return column

    def rewards(self, rewards: Tensor, penalty: KL | None) -> Tensor:
        """Return the reward at each step: what a reply earned is placed at its last token, the rest of the episode's
        reward at the last step of each branch, and each token's penalty is subtracted. [S] -> [T, S]"""
        batch = self.batch
        if penalty is None:
            cost = torch.zeros(len(batch), dtype=torch.float64)
        else:
            old = batch.column("old_logprobs").double()
            cost = penalty.coefficient * penalty.estimate(old, batch.column("reference_logprobs"))
        if batch.turn_rewards is not None:
            cost = cost - batch.turn_rewards
            rewards = rewards - batch.per_episode(batch.per_sequence(batch.turn_rewards))
        matrix = -self.of(cost)
        matrix[0] += rewards
        return matrix

    @staticmethod
    def scan(matrix: Tensor, decay: Tensor) -> Tensor:
        """Return x_k = m_k + decay * x_(k-1) down the rows. [T, S], [S] -> [T, S]"""
        result, running = torch.empty_like(matrix), torch.zeros_like(decay)
        for step, row in enumerate(matrix):
            running = row + decay * running
            result[step] = running
        return result


def reads_of(penalty: KL | None) -> frozenset[str]:
    """Return the columns that ``Steps.rewards`` reads for a penalty."""
    return frozenset() if penalty is None else penalty.reads | {"old_logprobs"}


def finite_rewards(batch: Batch, rewards: Tensor, name: str = "reward") -> Tensor:
    """Return the rewards, [S]. Raises ``DataError``, naming the group, if a reward is not finite."""
    bad = (~rewards.isfinite()).nonzero().squeeze(1).tolist()
    if bad:
        uid = batch.group_uids[int(batch.group[bad[0]])]
        raise DataError(
            f"group {uid!r}: the {name} is {rewards[bad[0]].item()} ({len(bad)} such sequences in this step); "
            "rewards must be finite numbers: fix the grader, or drop failed episodes instead of scoring them"
        )
    return rewards


def group_sums(batch: Batch, values: Tensor) -> Tensor:
    """Return the sum over the episodes of each sequence's group; ``values`` are equal in all branches of an episode.
    [S] -> [S]"""
    first = batch.first_branch
    return values.new_zeros(len(batch.group_uids)).index_add(0, batch.group[first], values[first])[batch.group]


def group_centred(batch: Batch, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reward minus the group's mean, exactly 0 if all are equal, and the group's number of episodes. [S]
    each"""
    members = group_sums(batch, torch.ones_like(rewards))
    groups = rewards.new_zeros(len(batch.group_uids))
    high = groups.scatter_reduce(0, batch.group, rewards, "amax", include_self=False)
    low = groups.scatter_reduce(0, batch.group, rewards, "amin", include_self=False)
    equal = (high == low)[batch.group]
    return (rewards - group_sums(batch, rewards) / members).masked_fill(equal, 0.0), members


def group_std(batch: Batch, centred: Tensor, members: Tensor, std: Std) -> Tensor:
    """Return the standard deviation in each sequence's group, from centred rewards; nan for a sample of one. [S] ->
    [S]"""
    return (group_sums(batch, centred.square()) / (members - int(std == "sample"))).sqrt()


def divided(values: Tensor, spread: Tensor) -> Tensor:
    """Return values / spread, and 0 where the value is 0, even if the spread is 0 or nan."""
    return torch.where(values == 0, 0.0, values / spread)


def whitened(values: Tensor, std: Std, eps: float) -> Tensor:
    """Return (x - mean) / (std + eps), exactly 0 if all are equal. [n] -> [n]"""
    if values.numel() == 0 or values.max() == values.min():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std(correction=int(std == "sample")) + eps)


def whitened_episodes(batch: Batch, values: Tensor, std: Std, eps: float) -> Tensor:
    """Whiten values of episodes, each of which counts once. [S] -> [S]"""
    first = batch.first_branch
    return whitened(values[first], std, eps)[first.cumsum(0) - 1]


def whitened_tokens(batch: Batch, advantages: Tensor, std: Std, eps: float) -> Tensor:
    """Whiten over the trained tokens only. [N] -> [N]"""
    result = torch.zeros_like(advantages)
    result[batch.trained] = whitened(advantages[batch.trained], std, eps)
    return result
