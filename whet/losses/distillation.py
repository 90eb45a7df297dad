"""Distillation from a teacher: from the log-probs of its k most likely tokens at each position or, on answers that the
student sampled, from its log-prob of the sampled token.

A divergence is of two distributions, p (the teacher's) and q (the student's), given as log-probs. [N, K] -> [N]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from whet.base.lazy import Tensor, torch
from whet.config import Component, Config
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import DIVERGENCES
from whet.losses.tensors import log1mexp
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics
from whet.metrics import Metrics


class Divergence(Config, ABC):
    """Base of all divergences."""

    @abstractmethod
    def __call__(self, p: Tensor, q: Tensor) -> Tensor: ...


class Forward(Divergence):
    """KL(p || q)."""

    def __call__(self, p: Tensor, q: Tensor) -> Tensor:
        return kl(p, q)


class Reverse(Divergence):
    """KL(q || p)."""

    def __call__(self, p: Tensor, q: Tensor) -> Tensor:
        return kl(q, p)


class Mixed(Divergence):
    """mix KL(p || q) + (1 - mix) KL(q || p)."""

    mix: float = Field(0.5, gt=0, lt=1)

    def __call__(self, p: Tensor, q: Tensor) -> Tensor:
        return self.mix * kl(p, q) + (1 - self.mix) * kl(q, p)


class JSD(Divergence):
    """Generalised Jensen-Shannon (arXiv 2306.13649): mix KL(p || m) + (1 - mix) KL(q || m), m = mix p + (1 - mix) q."""

    mix: float = Field(0.5, gt=0, lt=1)

    def __call__(self, p: Tensor, q: Tensor) -> Tensor:
        middle = torch.logaddexp(p + math.log(self.mix), q + math.log(1 - self.mix))
        return self.mix * kl(p, middle) + (1 - self.mix) * kl(q, middle)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q); outcomes of probability 0 under p contribute 0."""
    return (p.exp() * torch.where(p > -math.inf, p - q, 0.0)).sum(1)


class DistillationLoss(WeightedLoss):
    """A divergence between teacher and student over the teacher's top k, per token (arXiv 2306.13649)."""

    reads: ClassVar = frozenset({"topk_ids", "teacher_logprobs"})
    outputs: ClassVar = frozenset({"topk"})

    divergence: Annotated[Divergence, Component(DIVERGENCES)] = Forward()
    tail: Literal["renormalise", "bucket"] = "renormalise"
    """Treatment of the probability mass outside the top k: ``renormalise`` rescales both distributions to their top k;
    ``bucket`` adds one more outcome that holds the rest."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        teacher = self._normalised(at_trained(batch, batch.column("teacher_logprobs")))
        student = self._normalised(at_trained(batch, output.column("topk")))
        value = self.divergence(teacher, student)
        with torch.no_grad():
            means = {"distillation/forward_kl": kl(teacher, student), "distillation/reverse_kl": kl(student, teacher)}
        return value, token_metrics(batch, means)

    def _normalised(self, logprobs: Tensor) -> Tensor:
        """Return log-probs whose probabilities sum to 1, from the top k. [N, K] -> [N, K] or [N, K + 1]"""
        if self.tail == "renormalise":
            return logprobs.log_softmax(1)
        # Rounding can push the sum of the top k to 1 or above it.
        mass = logprobs.logsumexp(1, keepdim=True).clamp(max=-1e-6)
        return torch.cat([logprobs, log1mexp(mass)], 1)


class OnPolicyDistillationLoss(WeightedLoss):
    """-A lp with A = sg(lp_teacher - lp) on answers sampled from the student: the gradient of KL(student || teacher) at
    the sampled tokens (Lu, "On-Policy Distillation", 2025)."""

    reads: ClassVar = frozenset({"teacher_token_logprobs"})

    clamp: float = Field(10.0, gt=0)
    """Bound of |A|."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        logprobs = at_trained(batch, output.logprobs)
        teacher = at_trained(batch, batch.column("teacher_token_logprobs"))
        gap = teacher - logprobs.detach()
        value = -gap.clamp(-self.clamp, self.clamp) * logprobs
        return value, token_metrics(batch, {"distillation/reverse_kl": -gap})
