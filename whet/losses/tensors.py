"""Functions of tensors that several losses share."""

from __future__ import annotations

from whet.base.lazy import Tensor, torch
from whet.core.batch import Batch, ModelOutput
from whet.losses.weighted import at_trained

_EXPONENT_LIMIT = 20.0  # log-ratios are clamped before ``exp``: outside the gradient is 0 instead of infinite


def old_logprobs(output: ModelOutput, batch: Batch) -> Tensor:
    """Return the log-probs under the weights at the start of the step, detached, 0 where untrained: the batch's or, in
    the first update, which needs none, the model's. [N]"""
    source = output.logprobs if batch.old_logprobs is None else batch.old_logprobs
    return at_trained(batch, source.detach())


def bounded_exp(exponent: Tensor) -> Tensor:
    """Return ``exp`` of the exponent clamped to +-20, which can't overflow."""
    return exponent.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT).exp()


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, accurate near 0. [*] -> [*]"""
    return torch.log(-torch.expm1(x))


def mean_per_sequence(batch: Batch, column: Tensor) -> Tensor:
    """Return the mean over each sequence's trained tokens, 0 for a sequence without any. [N] -> [S]"""
    return batch.per_sequence(column) / batch.trained_per_sequence.clamp(min=1).to(column.device)


def won(margin: Tensor) -> Tensor:
    """Return 1 where the margin is above 0 and 0.5 for a tie, so that a model without a preference has accuracy 0.5.
    [*] -> [*]"""
    return (margin > 0) + 0.5 * (margin == 0)
