"""Who deserves what: the interface between rewards and the losses that learn from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from whet.batch import Batch
from whet.lazy import Tensor


@dataclass(slots=True)
class Credit:
    """What an advantage estimator fills in; 0 at untrained tokens."""

    advantages: Tensor  # [N] float64
    returns: Tensor | None = None  # [N] float64; what a critic learns


class AdvantageEstimator(Protocol):
    """A frozen config called with the batch of the whole step, before it is cut up. ``reads`` names the columns that
    must be filled before (``values``, ``old_logprobs``, ``reference_logprobs``)."""

    @property
    def reads(self) -> frozenset[str]: ...

    def __call__(self, batch: Batch) -> Credit: ...
