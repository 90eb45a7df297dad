"""An implicit reward model: a language model whose log-ratio to its initial weights is the reward. It is trained on
the outcomes of whole answers only; taken token by token, the same log-ratio is a process reward."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from whet.base.errors import DataError
from whet.base.lazy import Tensor, torch
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import Unit
from whet.losses.tensors import won
from whet.losses.weighted import WeightedLoss, weighted_means
from whet.metrics import Metrics


class ImplicitReward(WeightedLoss):
    """-o log sigmoid(r) - (1 - o) log sigmoid(-r), with o the outcome of an answer, in [0, 1], and r its reward, beta x
    the sum over its tokens of lp - lp_initial (arXiv 2412.01981, 2502.01456). Use ``weighting: sequence``, since an
    answer is one label, however long it is."""

    reads: ClassVar = frozenset({"reward_reference_logprobs"})
    unit: ClassVar[Unit] = "sequence"

    beta: float = Field(0.05, gt=0)
    outcome: str | None = None
    """The name of the score to use as the outcome; None: the reward."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        """Raises DataError for an outcome that is missing or outside [0, 1]."""
        outcomes = self._outcomes(batch)
        gain = output.logprobs - batch.column("reward_reference_logprobs")
        reward = self.beta * batch.per_sequence(gain)
        logsigmoid = torch.nn.functional.logsigmoid
        value = -outcomes * logsigmoid(reward) - (1 - outcomes) * logsigmoid(-reward)
        return batch.per_token(value), _metrics(batch, reward, outcomes)

    def _outcomes(self, batch: Batch) -> Tensor:
        """[S]"""
        outcomes = batch.reward if self.outcome is None else batch.score(self.outcome)
        valid = (outcomes >= 0) & (outcomes <= 1)
        for row in ((batch.trained_per_sequence > 0) & ~valid).nonzero().squeeze(1).tolist():
            source = "reward" if self.outcome is None else f"score {self.outcome!r}"
            raise DataError(
                f"group {batch.group_uids[int(batch.group[row])]!r}: the {source} of an answer is "
                f"{outcomes[row].item()}, but an outcome must be between 0 and 1; name another score in "
                "algorithm.reward_loss.outcome"
            )
        return outcomes


def _metrics(batch: Batch, reward: Tensor, outcomes: Tensor) -> Metrics:
    """Return ``outcome/accuracy``, the share of answers whose reward has the sign of their outcome (0 of either counts
    half), and ``outcome/right_reward`` and ``outcome/wrong_reward``, the mean rewards of right and of wrong answers."""
    trains, right = batch.trained_per_sequence > 0, outcomes > 0.5
    metrics = weighted_means(trains, {"outcome/accuracy": won(reward * (outcomes - 0.5))})
    metrics.merge(weighted_means(trains & right, {"outcome/right_reward": reward}))
    return metrics.merge(weighted_means(trains & ~right, {"outcome/wrong_reward": reward}))
