"""Divergences between two distributions, p (the teacher's) and q (the student's), given as log-probs. [N, K] -> [N]"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from pydantic import Field

from whet.base.lazy import Tensor, torch
from whet.config import Config


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
