"""KL divergence from the frozen reference model, estimated from the log-probs of sampled tokens (Schulman,
"Approximating KL Divergence", 2020): a term of the loss or, through ``estimate``, a penalty inside the reward."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from whet.base.lazy import Tensor
from whet.core.batch import Batch, ModelOutput
from whet.losses.tensors import bounded_exp, old_logprobs
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics
from whet.metrics import Metrics

Estimator = Literal["k1", "k2", "k3"]


class KL(WeightedLoss):
    """KL(policy || reference) per token, times a coefficient. With a coefficient of 0 it is only measured.

    With e = lp_ref - lp: k1 = -e, unbiased and noisy; k2 = e^2 / 2; k3 = exp(e) - 1 - e, unbiased and never negative.
    """

    reads: ClassVar = frozenset({"reference_logprobs"})

    bare: ClassVar = "coefficient"

    coefficient: float = Field(0.01, ge=0)
    estimator: Estimator = "k3"
    log_ratio_clamp: float = Field(20.0, gt=0)
    """Upper bound of |e|."""
    output_clamp: float = Field(10.0, gt=0)
    """Upper bound of the absolute estimate at one token, before the coefficient."""
    unbiased_gradient: bool = False
    """Multiply by exp(lp - lp_old), which makes the gradient unbiased (DeepSeek-V3.2, arXiv 2512.02556)."""

    def estimate(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        """Return the estimate at each token, without the coefficient. [N], [N] -> [N]"""
        e = (reference - logprobs).clamp(-self.log_ratio_clamp, self.log_ratio_clamp)
        if self.estimator == "k1":
            value = -e
        elif self.estimator == "k2":
            value = e.square() / 2
        else:
            value = e.expm1() - e
        return value.clamp(-self.output_clamp, self.output_clamp)

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        logprobs = at_trained(batch, output.logprobs)
        reference = at_trained(batch, batch.column("reference_logprobs"))
        value = self.estimate(logprobs, reference)
        if self.unbiased_gradient:
            value = value * bounded_exp(logprobs - old_logprobs(output, batch))
        return self.coefficient * value, kl_metrics(logprobs, reference, batch)


def kl_metrics(logprobs: Tensor, reference: Tensor, batch: Batch) -> Metrics:
    """Return ``kl``, the mean of k3 over the trained tokens, regardless of the estimator in the loss."""
    return token_metrics(batch, {"kl": KL().estimate(logprobs.detach(), reference)})
