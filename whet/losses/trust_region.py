"""Surrogates that bound a policy's step otherwise than by clipping each token's ratio: by a soft gate, by the
divergence of its probability, by a geometric mean, or by a penalty on a few tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from whet.base.lazy import Tensor, torch
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import Unit
from whet.losses.policy_gradient import PolicyGradient, policy_metrics
from whet.losses.tensors import bounded_exp, mean_per_sequence, old_logprobs
from whet.losses.weighted import at_trained
from whet.metrics import Metrics

_TINY = 1e-8  # added to probabilities before their logarithm, as the authors of DPPO do


class SAPOGate(PolicyGradient):
    """-(4 / tau) sigmoid(tau (rho - 1)) A, rho = exp(lp - lp_old): the gradient of a token fades as its ratio leaves 1,
    but is never cut off (SAPO, arXiv 2511.20347). At a ratio of 1 the gradient is PPO's. Use ``weighting: sequence``.
    """

    scales_with_advantage: ClassVar = True

    tau_positive: float = Field(1.0, gt=0)
    """The gate's temperature where A > 0; larger values fade faster."""
    tau_negative: float = Field(1.05, gt=0)
    """The gate's temperature elsewhere."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(at_trained(batch, output.logprobs) - old_logprobs(output, batch))
        advantages = at_trained(batch, batch.column("advantages"))
        tau = torch.full_like(ratio, self.tau_negative).masked_fill(advantages > 0, self.tau_positive)
        value = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
        never = torch.zeros_like(batch.trained)
        return value, policy_metrics(output, batch, ratio, never, never)


class DPPOMask(PolicyGradient):
    """-sg(min(rho, cap) M) A lp, rho = p / mu, where p is the token's probability and mu the generator's (DPPO, arXiv
    2602.04879). M is 0 where the divergence of (p, 1 - p) from (mu, 1 - mu) is above the threshold and the gradient
    would increase it. The ratio already contains what a correction corrects, so this surrogate takes none."""

    reads: ClassVar = frozenset({"advantages", "rollout_logprobs"})
    scales_with_advantage: ClassVar = True
    takes_correction: ClassVar = False

    divergence: Literal["tv", "kl"] = "tv"
    """``tv``: total variation, |p - mu|. ``kl``: mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)), for which the
    authors use thresholds of 0.05."""
    low: float = Field(0.15, gt=0)
    """The largest divergence of a token that becomes less likely."""
    high: float = Field(0.15, gt=0)
    """The largest divergence of a token that becomes more likely."""
    cap: float = Field(20.0, gt=0)
    """The largest ratio."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        logprobs = at_trained(batch, output.logprobs)
        sampled = at_trained(batch, batch.column("rollout_logprobs"))
        advantages = at_trained(batch, batch.column("advantages"))
        ratio = bounded_exp(logprobs.detach() - sampled)
        divergence = self._divergence(logprobs.detach(), sampled)
        high = (advantages > 0) & (divergence > self.high) & (ratio > 1)
        low = (advantages < 0) & (divergence > self.low) & (ratio < 1)
        value = -(ratio.clamp(max=self.cap) * ~(high | low)) * advantages * logprobs
        return value, policy_metrics(output, batch, ratio, high, low)

    def _divergence(self, logprobs: Tensor, sampled: Tensor) -> Tensor:
        p, mu = logprobs.exp(), sampled.exp()
        if self.divergence == "tv":
            return (p - mu).abs()
        return mu * (sampled - logprobs) + (1 - mu) * ((1 - mu + _TINY) / (1 - p + _TINY)).log()


class GMPOClip(PolicyGradient):
    """-A exp(mean over the answer of the clipped lp - lp_old): the geometric mean of the tokens' ratios, each clipped
    by itself to [exp(-clip_low), exp(clip_high)] on the side where PPO clips (GMPO, arXiv 2507.20673). The gradient
    reaches every unclipped token; ``gspo`` clips the mean instead. Use ``weighting: sequence``."""

    unit: ClassVar[Unit] = "sequence"
    scales_with_advantage: ClassVar = True

    clip_low: float = Field(0.4, gt=0)
    clip_high: float = Field(0.4, gt=0)

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        difference = at_trained(batch, output.logprobs) - old_logprobs(output, batch)
        advantages = at_trained(batch, batch.column("advantages"))
        clipped = torch.where(
            advantages > 0, difference.clamp(max=self.clip_high), difference.clamp(min=-self.clip_low)
        )
        ratio = batch.per_token(bounded_exp(mean_per_sequence(batch, clipped)))
        high = (difference > self.clip_high) & (advantages > 0)
        low = (difference < -self.clip_low) & (advantages < 0)
        return -ratio * advantages, policy_metrics(output, batch, ratio, high, low)


class KLCovPenalty(PolicyGradient):
    """-rho A without a clip, + ``coefficient`` x |lp - lp_old| on the tokens that the column ``high_covariance`` marks
    (KL-Cov, arXiv 2505.22617, with the authors' estimate of the KL). ``advantage: kl_cov`` fills the column."""

    reads: ClassVar = frozenset({"advantages", "high_covariance"})

    coefficient: float = Field(1.0, ge=0)

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        difference = at_trained(batch, output.logprobs) - old_logprobs(output, batch)
        ratio = bounded_exp(difference)
        marked = batch.column("high_covariance")
        value = self.coefficient * marked * difference.abs() - ratio * at_trained(batch, batch.column("advantages"))
        never = torch.zeros_like(batch.trained)
        return value, policy_metrics(output, batch, ratio, never, never)
