"""The forms of DPO: functions of a pair's margin h = beta [(lp_c - ref_c) - (lp_r - ref_r)]. [P] -> [P]"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import Field

from whet.base.lazy import Tensor, torch
from whet.config import Config


class Form(Config, ABC):
    """Base of all forms."""

    averages: ClassVar[bool] = False
    """The margin uses means over tokens, regardless of ``length_average``."""

    @abstractmethod
    def __call__(self, h: Tensor, beta: float) -> Tensor:
        """Return the loss of each pair."""


class Sigmoid(Form):
    """-log sigmoid(h) (arXiv 2305.18290); with ``label_smoothing`` e, conservative DPO:
    -(1 - e) log sigmoid(h) - e log sigmoid(-h)."""

    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a label is wrong."""

    def __call__(self, h: Tensor, beta: float) -> Tensor:
        right, wrong = _smoothed(h, self.label_smoothing)
        return right + wrong


class Robust(Form):
    """[-(1 - e) log sigmoid(h) + e log sigmoid(-h)] / (1 - 2e), e = ``label_smoothing`` (arXiv 2403.00409)."""

    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a label is wrong."""

    def __call__(self, h: Tensor, beta: float) -> Tensor:
        right, wrong = _smoothed(h, self.label_smoothing)
        return (right - wrong) / (1 - 2 * self.label_smoothing)


class Hinge(Form):
    """max(0, 1 - h) (arXiv 2305.10425)."""

    def __call__(self, h: Tensor, beta: float) -> Tensor:
        return torch.nn.functional.relu(1 - h)


class IPO(Form):
    """(h / beta - 1 / (2 beta))^2, with means over tokens (arXiv 2310.12036, length-averaged as in TRL)."""

    averages: ClassVar[bool] = True

    def __call__(self, h: Tensor, beta: float) -> Tensor:
        return (h / beta - 1 / (2 * beta)).square()


def _smoothed(h: Tensor, e: float) -> tuple[Tensor, Tensor]:
    """Return the loss if the label is right and if it is wrong, each times its probability."""
    logsigmoid = torch.nn.functional.logsigmoid
    return -(1 - e) * logsigmoid(h), -e * logsigmoid(-h)
