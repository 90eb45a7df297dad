"""What a loss is: a frozen config that is called with a model's output and a batch. It knows no model and no device."""

from __future__ import annotations

from typing import Literal, Protocol

from whet.base.lazy import Tensor
from whet.core.batch import Batch, ModelOutput, Output
from whet.metrics import Metrics

Unit = Literal["token", "sequence", "group"]


class Loss(Protocol):
    """``reads`` names the columns of the batch that must be filled before (``reference_logprobs``, ``advantages``, one
    of your own ...), ``outputs`` what the model is asked for. ``unit`` is the smallest piece of a batch on which the
    loss is still additive: token losses may be cut between any two sequences, group losses only between groups.
    """

    @property
    def reads(self) -> frozenset[str]: ...

    @property
    def outputs(self) -> frozenset[Output]: ...

    @property
    def unit(self) -> Unit: ...

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]: ...
