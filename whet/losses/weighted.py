"""The base of all losses: a value per token, summed with the batch's weights. There is no other normaliser.

Weight 0 times inf is nan, and so is its gradient. So a model's output at untrained tokens is replaced by 0 before
anything is computed from it (``at_trained``), not after.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

from whet.base.errors import DataError, naming
from whet.base.lazy import Tensor, no_grad, torch
from whet.config import Config
from whet.core.batch import Batch, ModelOutput, Output
from whet.core.in_place import unchanged
from whet.losses.base import Unit
from whet.metrics import Metrics
from whet.processes.user_code import place_of, place_of_user


class WeightedLoss(Config, ABC):
    """A loss of the form ``(weight * per_token).sum()``, additive over any parts of a batch that ``unit`` allows."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()

    @property
    def outputs(self) -> frozenset[Output]:
        return frozenset({"logprobs"})

    @property
    def unit(self) -> Unit:
        return "token"

    def zero_gradient(self, batch: Batch) -> Tensor:
        """Return a mask [S] of the sequences whose loss and gradient are exactly 0 for every model output. The learner
        skips these sequences. By default there are none."""
        return torch.zeros(batch.sequences, dtype=torch.bool)

    @abstractmethod
    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the value of each token, [N], finite everywhere and 0 where untrained. The loss of a sequence or a
        pair is repeated at each of its trained tokens, so that its share is the sum of their weights."""

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the scalar loss. The metric ``loss`` is the weighted mean, which is equal if the weights sum to 1.
        Raises ``DataError`` unless ``per_token`` returns a value for each token, and metrics: any other shape could be
        broadcast to a loss with other weights. The same for a ``per_token`` that changes what it gets."""
        where = place_of(type(self), "per_token")
        with unchanged(batch, where, output.columns()), naming(place_of_user(type(self), "per_token")):
            per_token, metrics = _checked(self, self.per_token(output, batch), batch)
        weight = batch.column("weight")
        loss = (weight * per_token).sum()
        return loss, weighted_means(weight, {"loss": per_token}).merge(metrics)


def _checked(loss: WeightedLoss, returned: object, batch: Batch) -> tuple[Tensor, Metrics]:
    place = place_of(type(loss), "per_token")
    match returned:
        case torch.Tensor() as values, Metrics() as metrics if values.shape == (len(batch),):
            if "loss" in metrics:
                raise DataError(
                    f"{place} gives a metric the name 'loss', which the loss itself has: choose another name"
                )
            return values, metrics
        case torch.Tensor() as values, Metrics():
            what = f"values of the shape {list(values.shape)}"
        case tuple():
            what = f"({', '.join(type(each).__name__ for each in returned)})"
        case _:
            what = f"a {type(returned).__name__}"
    raise DataError(
        f"{place} must return a tensor with a value for each of the batch's {len(batch)} tokens, and Metrics(), not "
        f"{what}"
    )


def at_trained(batch: Batch, column: Tensor) -> Tensor:
    """Return the column with 0 at untrained tokens, which also get no gradient. [N] or [N, K]. Raises ``DataError`` for
    an output or a column that is None, because no loss asks for it."""
    if column is None:
        raise DataError(
            "an output of the model, or a column of the batch, is None: a loss names the outputs that it needs in "
            "`outputs`, as in outputs: ClassVar = frozenset({'entropy'}), and the columns in `reads`"
        )
    trained = batch.trained if column.ndim == 1 else batch.trained.unsqueeze(1)
    return torch.where(trained, column, torch.zeros_like(column))


@no_grad
def weighted_means(weight: Tensor, columns: Mapping[str, Tensor]) -> Metrics:
    """Return the weighted means of columns. [N] each"""
    names = list(columns)
    totals = [(weight * column).sum() for column in columns.values()]

    def record(weights: float, *totals: float) -> Metrics:
        metrics = Metrics()
        for name, total in zip(names, totals, strict=True):
            metrics.mean(name, total, weights)
        return metrics

    return Metrics().later(torch.stack([weight.sum(), *totals]), record)


@no_grad
def token_metrics(batch: Batch, means: Mapping[str, Tensor], ranges: Mapping[str, Tensor] | None = None) -> Metrics:
    """Return the means over the trained tokens, and ``<name>/min`` and ``<name>/max`` of ``ranges``. Columns are [N],
    bool or float."""
    if not len(batch):
        return Metrics()
    trained, bounded = batch.trained, list(ranges or {})
    sums_and_bounds = [trained.sum()]
    sums_and_bounds += [at_trained(batch, column.double()).sum() for column in means.values()]
    for column in (ranges or {}).values():
        sums_and_bounds += [column.masked_fill(~trained, math.inf).amin()]
        sums_and_bounds += [column.masked_fill(~trained, -math.inf).amax()]
    names = list(means)

    def record(count: float, *numbers: float) -> Metrics:
        metrics = Metrics()
        if count:
            for name, total in zip(names, numbers, strict=False):
                metrics.mean(name, total, count)
            bounds = iter(numbers[len(names) :])
            for name in bounded:
                metrics.min(f"{name}/min", next(bounds)).max(f"{name}/max", next(bounds))
        return metrics

    return Metrics().later(torch.stack(sums_and_bounds), record)
