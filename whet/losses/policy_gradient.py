"""The policy-gradient objectives: the contribution of one token of an answer, given its advantage.

The old log-probs (lp_old), taken under the weights at the start of the step, are read from the batch. If that column is
empty, the step is exactly on-policy and lp_old is the log-prob itself, detached. Corrections, KL and entropy terms are
added by ``composite``.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from whet.base.lazy import Tensor, torch
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import Unit
from whet.losses.kl import kl_metrics
from whet.losses.tensors import bounded_exp, mean_per_sequence, old_logprobs
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics
from whet.metrics import Metrics


class PolicyGradient(WeightedLoss):
    """Base of the surrogates. All report ``ratio/mean``, ``/min``, ``/max``, ``clip/high``, ``clip/low`` and
    ``entropy/approximate`` (mean of -lp), and also ``entropy`` and ``kl`` (k3 to the reference) if the batch has
    them."""

    reads: ClassVar = frozenset({"advantages"})
    scales_with_advantage: ClassVar[bool] = False
    """True if a token's value is its advantage times a finite factor, so that an advantage of 0 gives a gradient of
    exactly 0."""
    takes_correction: ClassVar[bool] = True
    """False if the importance ratio already starts from the generator's log-probs."""

    def zero_gradient(self, batch: Batch) -> Tensor:
        if not self.scales_with_advantage:
            return super().zero_gradient(batch)
        return batch.per_sequence((batch.column("advantages") != 0).long()) == 0


class PPOClip(PolicyGradient):
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(lp - lp_old) (PPO, arXiv 1707.06347)."""

    scales_with_advantage: ClassVar = True

    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    """A value larger than ``clip_low`` lets unlikely tokens grow more (clip-higher, DAPO, arXiv 2503.14476)."""
    dual_clip: float | None = Field(None, gt=1)
    """For A < 0 the loss is at most -dual_clip * A (arXiv 1912.09729)."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(at_trained(batch, output.logprobs) - old_logprobs(output, batch))
        advantages = at_trained(batch, batch.column("advantages"))
        value, high, low = _clipped(ratio, advantages, self.clip_low, self.clip_high)
        metrics = policy_metrics(output, batch, ratio, high, low)
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            over = (advantages < 0) & (value > bound)
            value = torch.where(over, bound, value)
            metrics.merge(token_metrics(batch, {"clip/dual": over}))
        return value, metrics


class GSPOClip(PolicyGradient):
    """PPO-clip with one ratio per sequence, exp(mean_t (lp - lp_old)) (GSPO, arXiv 2507.18071). Each token has its
    sequence's ratio, with the gradient through the token's log-prob (the paper's GSPO-token). Use ``weighting:
    sequence``."""

    unit: ClassVar[Unit] = "sequence"
    scales_with_advantage: ClassVar = True

    clip_low: float = Field(3e-4, gt=0)
    clip_high: float = Field(4e-4, gt=0)

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        logprobs = at_trained(batch, output.logprobs)
        sequence_ratio = bounded_exp(mean_per_sequence(batch, (logprobs - old_logprobs(output, batch)).detach()))
        ratio = batch.per_token(sequence_ratio) * (logprobs - logprobs.detach()).exp()
        advantages = at_trained(batch, batch.column("advantages"))
        value, high, low = _clipped(ratio, advantages, self.clip_low, self.clip_high)
        return value, policy_metrics(output, batch, ratio, high, low)


class CISPOClip(PolicyGradient):
    """-sg(clip(rho, 0, 1 + clip_high)) A lp: the clip bounds a token's weight but never removes its gradient
    (MiniMax-M1, arXiv 2506.13585)."""

    scales_with_advantage: ClassVar = True

    clip_high: float = Field(4.0, gt=0)

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        logprobs = at_trained(batch, output.logprobs)
        ratio = bounded_exp(logprobs - old_logprobs(output, batch)).detach()
        advantages = at_trained(batch, batch.column("advantages"))
        value = -ratio.clamp(max=1 + self.clip_high) * advantages * logprobs
        high = ratio > 1 + self.clip_high
        return value, policy_metrics(output, batch, ratio, high, torch.zeros_like(high))


class Reinforce(PolicyGradient):
    """-A lp (Williams 1992; RLOO, arXiv 2402.14740). Exact only for the first update after sampling."""

    scales_with_advantage: ClassVar = True

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        logprobs = at_trained(batch, output.logprobs)
        value = -at_trained(batch, batch.column("advantages")) * logprobs
        ratio = bounded_exp(logprobs - old_logprobs(output, batch))
        never = torch.zeros_like(batch.trained)
        return value, policy_metrics(output, batch, ratio, never, never)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clipped surrogate, and masks of the tokens whose gradient is clipped above and below. [N] each"""
    value = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return value, (ratio > 1 + high) & (advantages > 0), (ratio < 1 - low) & (advantages < 0)


def policy_metrics(output: ModelOutput, batch: Batch, ratio: Tensor, high: Tensor, low: Tensor) -> Metrics:
    """Return the metrics that all surrogates report, from the ratio of each token and masks of the tokens whose
    gradient is stopped above and below. [N] each"""
    means = {"ratio/mean": ratio, "clip/high": high, "clip/low": low, "entropy/approximate": -output.logprobs}
    if output.entropy is not None:
        means["entropy"] = output.entropy
    metrics = token_metrics(batch, means, {"ratio": ratio})
    if batch.reference_logprobs is not None:
        metrics.merge(kl_metrics(output.logprobs, batch.reference_logprobs, batch))
    return metrics
