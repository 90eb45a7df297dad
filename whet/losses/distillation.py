"""Learning from a teacher: from the log-probs of its k likeliest tokens at each place, or, on the student's own
answers, from its opinion of the token that was sampled."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from whet.batch import Batch, ModelOutput
from whet.lazy import Tensor, torch
from whet.losses.weighted import WeightedLoss, at_trained, log1mexp, token_metrics
from whet.metrics import Metrics


class DistillationLoss(WeightedLoss):
    """A divergence between teacher p and student q over the teacher's top k, per token (arXiv 2306.13649).

    ``forward``: KL(p || q); ``reverse``: KL(q || p); ``mixed``: mix x forward + (1 - mix) x reverse; ``jsd``:
    generalised Jensen-Shannon, mix KL(p || m) + (1 - mix) KL(q || m) with m = mix p + (1 - mix) q.
    """

    reads: ClassVar = frozenset({"topk_ids", "teacher_logprobs"})
    outputs: ClassVar = frozenset({"topk"})

    divergence: Literal["forward", "reverse", "mixed", "jsd"] = "forward"
    mix: float = Field(0.5, gt=0, lt=1)
    """For the divergences mixed and jsd."""
    tail: Literal["renormalise", "bucket"] = "renormalise"
    """What becomes of the mass outside the top k: nothing, both are renormalised; or one more outcome holds it."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        teacher = self._whole(at_trained(batch, batch.column("teacher_logprobs")))
        student = self._whole(at_trained(batch, output.column("topk")))
        forward, reverse = divergence(teacher, student), divergence(student, teacher)
        if self.divergence == "forward":
            value = forward
        elif self.divergence == "reverse":
            value = reverse
        elif self.divergence == "mixed":
            value = self.mix * forward + (1 - self.mix) * reverse
        else:
            middle = torch.logaddexp(teacher + math.log(self.mix), student + math.log(1 - self.mix))
            value = self.mix * divergence(teacher, middle) + (1 - self.mix) * divergence(student, middle)
        return value, token_metrics(batch, {"distillation/forward_kl": forward, "distillation/reverse_kl": reverse})

    def _whole(self, logprobs: Tensor) -> Tensor:
        """Log-probs that add up to 1 from those of the top k. [N, K] -> [N, K] or [N, K + 1]"""
        if self.tail == "renormalise":
            return logprobs.log_softmax(1)
        # Rounding can push the sum of the top k to 1 and beyond.
        mass = logprobs.logsumexp(1, keepdim=True).clamp(max=-1e-6)
        return torch.cat([logprobs, log1mexp(mass)], 1)


class OnPolicyDistillationLoss(WeightedLoss):
    """-A lp with A = sg(lp_teacher - lp) on the student's own answers: the gradient of KL(student || teacher) at the
    sampled tokens (Lu, "On-Policy Distillation", 2025)."""

    reads: ClassVar = frozenset({"teacher_token_logprobs"})

    clamp: float = Field(10.0, gt=0)
    """Bound of |A|."""

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        logprobs = at_trained(batch, output.logprobs)
        teacher = at_trained(batch, batch.column("teacher_token_logprobs"))
        gap = teacher - logprobs.detach()
        value = -gap.clamp(-self.clamp, self.clamp) * logprobs
        return value, token_metrics(batch, {"distillation/reverse_kl": -gap})


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probs; outcomes that p excludes add nothing. [N, K], [N, K] -> [N]"""
    return (p.exp() * torch.where(p > -math.inf, p - q, 0.0)).sum(1)
