"""The loss of supervised fine-tuning."""

from __future__ import annotations

from whet.base.lazy import Tensor
from whet.core.batch import Batch, ModelOutput
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics
from whet.metrics import Metrics


class SFTLoss(WeightedLoss):
    """-lp over the trained tokens. The loss mask is set when rows are turned into trajectories."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        nll = -at_trained(batch, output.logprobs)
        means = {"nll": nll}
        if output.entropy is not None:
            means["entropy"] = output.entropy
        return nll, token_metrics(batch, means)
