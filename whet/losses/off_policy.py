"""The gap between the engine that sampled and the learner that trains: measured always, corrected where asked.

d = lp_old - lp_gen per trained token, without a gradient: both should agree on every token they score, and where
weights were published since, d also holds their age. A correction turns d into a factor of the policy-gradient term.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from pydantic import Field

from whet.base.lazy import Tensor
from whet.config import Config
from whet.core.batch import Batch
from whet.losses.base import Unit
from whet.losses.weighted import at_trained, bounded_exp, mean_per_sequence, token_metrics
from whet.metrics import Metrics

MISMATCH = "mismatch/token_mult_prob_error"
"""The metric that an alarm goes by."""


class Correction(Protocol):
    """Turns d into weights. [N], 0 where untrained -> [N]"""

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
    """exp(d) between ``low`` and ``high``, 0 beyond: doubtful tokens are left out (Ling 2.0, arXiv 2510.18855)."""

    low: float = Field(0.5, ge=0)
    high: float = Field(5.0, gt=0)

    @property
    def unit(self) -> Unit:
        return "token"

    def __call__(self, difference: Tensor, batch: Batch) -> Tensor:
        weight = bounded_exp(difference)
        return weight * ((weight >= self.low) & (weight <= self.high))


class SequenceMask(Config):
    """exp(d), but 0 for the whole of a sequence whose geometric mean exp(mean_t d) lies outside [low, high]."""

    low: float = Field(0.98, ge=0)
    high: float = Field(1.02, gt=0)

    @property
    def unit(self) -> Unit:
        return "sequence"

    def __call__(self, difference: Tensor, batch: Batch) -> Tensor:
        mean = bounded_exp(mean_per_sequence(batch, difference))
        keep = (mean >= self.low) & (mean <= self.high)
        return bounded_exp(difference) * batch.per_token(keep.to(difference.dtype))


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, batch: Batch) -> Tensor:
    """d = lp_old - lp_gen, 0 where untrained. [N]"""
    return at_trained(batch, old_logprobs) - at_trained(batch, rollout_logprobs)


def mismatch_metrics(batch: Batch) -> Metrics:
    """Measure how far apart sampler and learner are on the trained tokens for which both computed log-probs; in front
    of each name stands ``mismatch/``.

    ``token_mult_prob_error``: mean exp|d| (1 is perfect); ``kl``: mean of exp(d) - 1 - d; ``max``: the largest |d|;
    ``sequence`` and ``sequence_max``: mean and maximum over sequences of exp(mean_t |d|).
    """
    old, rollout = batch.old_logprobs, batch.rollout_logprobs
    if old is None or rollout is None:
        return Metrics()
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
