"""Preference losses: for pairs of answers (DPO and its relatives) and for single labelled rows (KTO).

A pair is a group of two; the chosen answer is the one with the higher reward. Each trained token of a pair has the
pair's loss as its value, so a pair's share of the step is the sum of its token weights: 1 / pairs when weighted by
group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from whet.base.errors import DataError
from whet.base.lazy import Tensor, torch
from whet.config import Component
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import FORMS, Unit
from whet.losses.dpo_forms import Form, Sigmoid
from whet.losses.tensors import log1mexp, mean_per_sequence, won
from whet.losses.weighted import WeightedLoss, weighted_means
from whet.metrics import Metrics


@dataclass(slots=True)
class Pairs:
    """The chosen and the rejected sequence of each pair that has a trained token."""

    chosen: Tensor  # [P] int64, index of a sequence
    rejected: Tensor  # [P] int64

    @classmethod
    def of(cls, batch: Batch) -> Pairs:
        """Raises DataError, naming the group, if a group isn't a pair of a better and a worse answer."""
        reward, groups, trains = batch.reward.tolist(), batch.group.tolist(), batch.trained_per_sequence.tolist()
        episodes = batch.episode.tolist()
        members: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        chosen, rejected = [], []
        for group, rows in members.items():
            if len({episodes[row] for row in rows}) < len(rows):
                raise DataError(
                    f"group {batch.group_uids[group]!r} has an episode of several branches (an agent rewrote its "
                    "history, or started a second conversation), but a preference pair is two answers of one branch "
                    "each; choose grpo or another algorithm with advantages"
                )
            if len(rows) != 2 or reward[rows[0]] == reward[rows[1]] or any(reward[row] != reward[row] for row in rows):
                raise DataError(
                    f"group {batch.group_uids[group]!r} is not a preference pair: it must have two answers with "
                    "different rewards, the higher one for the chosen answer, but its rewards are "
                    f"{[reward[row] for row in rows]}"
                )
            if any(trains[row] for row in rows):
                worse, better = sorted(rows, key=lambda row: reward[row])
                chosen.append(better)
                rejected.append(worse)
        device = batch.trained.device
        return cls(torch.tensor(chosen, device=device).long(), torch.tensor(rejected, device=device).long())

    def per_token(self, batch: Batch, values: Tensor) -> Tensor:
        """Return each pair's value at the trained tokens of both its answers. [P] -> [N]"""
        rows = values.new_zeros(batch.sequences)
        return batch.per_token(rows.index_add(0, self.chosen, values).index_add(0, self.rejected, values))

    def metrics(self, chosen_reward: Tensor, rejected_reward: Tensor) -> Metrics:
        """Return the accuracy, the margin and both rewards, as means over pairs. [P] each"""
        margin = chosen_reward - rejected_reward
        means = {
            "accuracy": won(margin),
            "margin": margin,
            "chosen_reward": chosen_reward,
            "rejected_reward": rejected_reward,
        }
        return weighted_means(torch.ones_like(margin), {f"preference/{name}": value for name, value in means.items()})


class PairLoss(WeightedLoss):
    """Base of the losses of pairs."""

    unit: ClassVar[Unit] = "group"


class DPOLoss(PairLoss):
    """Direct preference optimisation (arXiv 2305.18290): the form of h = beta [(lp_c - ref_c) - (lp_r - ref_r)], each a
    sum over the answer's trained tokens."""

    reads: ClassVar = frozenset({"reference_logprobs"})

    beta: float = Field(0.1, gt=0)
    form: Annotated[Form, Component(FORMS)] = Sigmoid()
    length_average: bool = False
    """Use means instead of sums over tokens, so that long answers don't weigh more. IPO always uses means."""
    sft_weight: float = Field(0.0, ge=0)
    """Adds this times the chosen answer's mean -lp (RPO, arXiv 2404.19733)."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        gain = output.logprobs - batch.column("reference_logprobs")
        pairs = Pairs.of(batch)
        averaged = self.length_average or self.form.averages
        rewards = self.beta * (mean_per_sequence(batch, gain) if averaged else batch.per_sequence(gain))
        chosen, rejected = rewards[pairs.chosen], rewards[pairs.rejected]
        value = self.form(chosen - rejected, self.beta)
        if self.sft_weight:
            value = value - self.sft_weight * mean_per_sequence(batch, output.logprobs)[pairs.chosen]
        return pairs.per_token(batch, value), pairs.metrics(chosen, rejected)


class SimPOLoss(PairLoss):
    """-log sigmoid(beta (mean lp_c - mean lp_r) - gamma), without a reference model (arXiv 2405.14734)."""

    beta: float = Field(2.0, gt=0)
    gamma: float = Field(0.5, ge=0)
    """The margin by which the chosen answer should win."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch)
        rewards = self.beta * mean_per_sequence(batch, output.logprobs)
        chosen, rejected = rewards[pairs.chosen], rewards[pairs.rejected]
        return pairs.per_token(batch, -torch.nn.functional.logsigmoid(chosen - rejected - self.gamma)), pairs.metrics(
            chosen, rejected
        )


class ORPOLoss(PairLoss):
    """Mean -lp_c - weight x log sigmoid(log odds_c - log odds_r), odds = p / (1 - p), p = exp(mean lp): supervised
    and preference learning in one loss, without a reference model (arXiv 2403.07691)."""

    weight: float = Field(0.1, ge=0)

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch)
        mean = mean_per_sequence(batch, output.logprobs)
        # An answer of probability 1 has infinite odds.
        below = mean.clamp(max=-1e-6)
        odds = below - log1mexp(below)
        value = -mean[pairs.chosen] - self.weight * torch.nn.functional.logsigmoid(
            odds[pairs.chosen] - odds[pairs.rejected]
        )
        rewards = self.weight * mean
        return pairs.per_token(batch, value), pairs.metrics(rewards[pairs.chosen], rewards[pairs.rejected])


class KTOLoss(WeightedLoss):
    """KTO, for single rows that are desirable (reward 1) or undesirable (reward 0) (arXiv 2402.01306).

    desirable_weight x (1 - sigmoid(beta (g - z))) and undesirable_weight x (1 - sigmoid(beta (z - g))), with g the sum
    over the answer of lp - lp_ref. The reference point z is an estimate of KL(policy || reference). Estimated on a part
    of a step, it would make the loss depend on how the step is split, so the algorithm fills the column
    ``reference_point`` for a whole step (zeros: APO-zero, arXiv 2408.06266).
    """

    reads: ClassVar = frozenset({"reference_logprobs", "reference_point"})
    unit: ClassVar[Unit] = "sequence"

    beta: float = Field(0.1, gt=0)
    desirable_weight: float = Field(1.0, ge=0)
    undesirable_weight: float = Field(1.0, ge=0)

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        """Raises DataError for a reward that is neither 0 nor 1."""
        for row, reward in enumerate(batch.reward.tolist()):
            if reward not in (0.0, 1.0):
                uid = batch.group_uids[int(batch.group[row])]
                raise DataError(f"group {uid!r}: KTO takes reward 1 (desirable) or 0 (undesirable), not {reward}")
        gain = batch.per_sequence(output.logprobs - batch.column("reference_logprobs"))
        desirable = batch.reward == 1
        h = self.beta * (gain - batch.column("reference_point"))
        good, bad = self.desirable_weight * torch.sigmoid(-h), self.undesirable_weight * torch.sigmoid(h)
        value = torch.where(desirable, good, bad)
        return batch.per_token(value), self._metrics(batch, self.beta * gain, desirable)

    def _metrics(self, batch: Batch, rewards: Tensor, desirable: Tensor) -> Metrics:
        """Return the mean implicit reward of desirable and of undesirable rows, and the accuracy: the share of rows
        whose implicit reward has the right sign."""
        trains = batch.trained_per_sequence > 0
        metrics = weighted_means(trains & desirable, {"preference/desirable_reward": rewards})
        metrics.merge(weighted_means(trains & ~desirable, {"preference/undesirable_reward": rewards}))
        right = won(torch.where(desirable, rewards, -rewards))
        return metrics.merge(weighted_means(trains, {"preference/accuracy": right}))
