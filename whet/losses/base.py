"""What a loss is: a frozen config that is called with a model's output and a batch. It knows no model and no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from whet.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from whet.batch import Batch, ModelOutput

Unit = Literal["token", "sequence", "group"]


class Loss(Protocol):
    """``needs`` names batch columns that must be filled before (``reference_logprobs``, ``advantages`` ...) and model
    outputs beyond log-probs (``entropy``, ``values``, ``topk``). ``unit`` is the smallest piece of a batch on which the
    loss is still additive: token losses may be cut between any two sequences, group losses only between groups.
    """

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def unit(self) -> Unit: ...

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]: ...
