"""The mismatch between the engine that samples and the learner that trains. It is always measured and, if the recipe
sets a correction, corrected.

d = lp_old - lp_gen per trained token, without a gradient. With equal weights, engine and learner should agree on every
token; if weights were published in between, d also contains the policy's change. A correction turns d into a factor
(a truncated or masked importance ratio) of the policy-gradient term.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from pydantic import Field

from whet.base.lazy import Tensor
from whet.config import Config
from whet.core.batch import Batch
from whet.losses.base import Unit
from whet.losses.tensors import bounded_exp, mean_per_sequence
from whet.losses.weighted import at_trained, token_metrics
from whet.metrics import Metrics

MISMATCH = "mismatch/token_mult_prob_error"
"""The metric that mismatch warnings are based on."""


class Correction(Protocol):
    """Return the weight of each token, given d. [N], 0 where untrained -> [N]"""

    @property
    def unit(self) -> Unit: ...

    def __call__(self, difference: Tensor, batch: Batch) -> Tensor: ...


class TIS(Config):
    """Truncated importance sampling: min(exp(d), cap) (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025)."""

    cap: float = Field(2.0, gt=0)

    @property
    def unit(self) -> Unit:
        return "token"

    def __call__(self, difference: Tensor, batch: Batch) -> Tensor:
        return bounded_exp(difference).clamp(max=self.cap)


class IcePop(Config):
    """exp(d) within [low, high] and 0 outside: tokens whose importance ratio is outside the range are masked (Ling
    2.0, arXiv 2510.18855). The range contains 1, the ratio where engine and learner agree."""

    low: float = Field(0.5, ge=0, le=1)
    high: float = Field(5.0, ge=1)

    @property
    def unit(self) -> Unit:
        return "token"

    def __call__(self, difference: Tensor, batch: Batch) -> Tensor:
        weight = bounded_exp(difference)
        return weight * ((weight >= self.low) & (weight <= self.high))


class SequenceMask(Config):
    """exp(d), but 0 for all tokens of a sequence whose geometric mean exp(mean_t d) is outside [low, high], which
    contains 1."""

    low: float = Field(0.98, ge=0, le=1)
    high: float = Field(1.02, ge=1)

    @property
    def unit(self) -> Unit:
        return "sequence"

    def __call__(self, difference: Tensor, batch: Batch) -> Tensor:
        mean = bounded_exp(mean_per_sequence(batch, difference))
        keep = (mean >= self.low) & (mean <= self.high)
        return bounded_exp(difference) * batch.per_token(keep.to(difference.dtype))


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, batch: Batch) -> Tensor:
    """Return d = lp_old - lp_gen, 0 where untrained. [N]"""
    return at_trained(batch, old_logprobs) - at_trained(batch, rollout_logprobs)


def mismatch_metrics(batch: Batch) -> Metrics:
    """Return how much sampler and learner differ on the trained tokens for which both computed log-probs. Each name is
    prefixed with ``mismatch/``.

    ``token_mult_prob_error``: mean exp|d| (1 is perfect); ``kl``: mean of exp(d) - 1 - d; ``max``: the largest |d|;
    ``sequence`` and ``sequence_max``: mean and maximum over sequences of exp(mean_t |d|).
    """
    metrics = Metrics()
    for part in batch.parts():
        if part.old_logprobs is not None and part.rollout_logprobs is not None:
            metrics.merge(_mismatch_metrics(part, part.old_logprobs, part.rollout_logprobs))
    return metrics


def _mismatch_metrics(batch: Batch, old: Tensor, rollout: Tensor) -> Metrics:
    batch = replace(batch, trained=batch.trained & ~old.isnan())
    d = mismatch(old, rollout, batch)
    means = {MISMATCH: bounded_exp(d.abs()), "mismatch/kl": bounded_exp(d) - 1 - d}
    metrics = token_metrics(batch, means)
    sampled = batch.trained_per_sequence > 0
    if sampled.any():
        per_sequence = bounded_exp(mean_per_sequence(batch, d.abs()))[sampled.to(d.device)]
        metrics.max("mismatch/max", d.abs().max().item())
        metrics.mean("mismatch/sequence", per_sequence.sum().item(), per_sequence.numel())
        metrics.max("mismatch/sequence_max", per_sequence.max().item())
    return metrics
