"""Losses of a reward model: a scalar head that scores conversations. A sequence's score is the value at its last
trained token, which is computed from the hidden state of the token before it. In rows made by
``whet.data.rows.judged`` that token is the last one of the rendered conversation, which is also the token that
transformers' sequence classifiers use."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from whet.base.errors import DataError
from whet.base.lazy import Tensor, torch
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import Unit
from whet.losses.preference import PairLoss, Pairs
from whet.losses.weighted import WeightedLoss, weighted_means
from whet.metrics import Metrics


class BradleyTerry(PairLoss):
    """-log sigmoid(s_c - s_r - margin) for pairs (Bradley and Terry 1952; margin: Llama 2, arXiv 2307.09288)."""

    outputs: ClassVar = frozenset({"values"})

    margin: str | None = None
    """The name of a score; the margin is the chosen answer's score minus the rejected answer's."""
    centre_coefficient: float = Field(0.0, ge=0)
    """Adds this times (s_c + s_r)^2, which keeps scores around 0 (arXiv 2312.09244)."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        """Raises DataError if an answer lacks the margin's score."""
        pairs = Pairs.of(batch)
        scores = sequence_scores(output, batch)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        value = -torch.nn.functional.logsigmoid(chosen - rejected - self._margin(batch, pairs))
        value = value + self.centre_coefficient * (chosen + rejected).square()
        return pairs.per_token(batch, value), pairs.metrics(chosen, rejected)

    def _margin(self, batch: Batch, pairs: Pairs) -> Tensor | float:
        if self.margin is None:
            return 0.0
        if self.margin not in batch.scores:
            raise DataError(
                f"loss.margin = {self.margin!r} is not a score of the answers: leave it out, or set Episode.scores "
                "in the group() of your rows"
            )
        ratings = batch.scores[self.margin]
        margin = ratings[pairs.chosen] - ratings[pairs.rejected]
        if not margin.isfinite().all():
            raise DataError(
                f"loss.margin = {self.margin!r} must be a finite score of every answer, but some answers have none"
            )
        return margin


class ScoreRegression(WeightedLoss):
    """(s - reward)^2 for rows with a numeric reward."""

    outputs: ClassVar = frozenset({"values"})
    unit: ClassVar[Unit] = "sequence"

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        scores = sequence_scores(output, batch)
        error = scores - batch.reward
        trains = batch.trained_per_sequence > 0
        metrics = weighted_means(trains, {"score/mean": scores, "score/absolute_error": error.abs()})
        return batch.per_token(error.square()), metrics


def sequence_scores(output: ModelOutput, batch: Batch) -> Tensor:
    """Return the value at each sequence's last trained token, 0 for a sequence without trained tokens. [S]"""
    values = output.column("values")
    index = torch.arange(len(batch), device=values.device)
    last = torch.full((batch.sequences,), -1, device=values.device)
    last = last.scatter_reduce(0, batch.sequence.clamp(min=0), index.where(batch.trained, -1), "amax")
    # Index -1 selects the appended 0.
    return torch.cat([values, values.new_zeros(1)])[last]
