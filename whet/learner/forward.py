"""From a batch to what the model says about it. One gather, by predictor, is all the shifting there is; the head runs
only where a token is trained. Knows no loss and no optimizer."""

from collections.abc import Set
from typing import Any

from torch import Tensor, nn

from whet.batch import Batch, ModelOutput
from whet.learner.base import Top
from whet.models.forest_attention import forest_hidden
from whet.models.head import head_of, ids_logprobs, token_logprobs, topk_logprobs
from whet.models.shards import WHOLE, Shards
from whet.models.stages import Passage
from whet.models.values import ValueHead


def forward(
    model: nn.Module,
    batch: Batch,
    outputs: Set[str] = frozenset(),
    value_head: ValueHead | None = None,
    shards: Shards = WHOLE,
    passage: Passage | None = None,
) -> ModelOutput:
    """What ``model`` says about the batch's N tokens, on its device; every column is 0 where untrained.

    ``outputs`` adds to the log-probs: ``entropy`` [N], and ``topk`` [N, K], the log-probs of the batch's ``topk_ids``.
    With a value head the values [N] are all there is, and log-probs are 0. Gradients flow; where no token is trained,
    zeros flow, so that all ranks of a step take part in the backward pass. ``passage``: hidden states come from the
    stages before, and this is the last one.
    """
    picked, trained = _predicting(model, batch, shards, passage)

    def spread(rows: Tensor) -> Tensor:
        return shards.tokens.combine(rows.new_zeros(len(batch), *rows.shape[1:]).index_copy(0, trained, rows))

    if value_head is not None:
        values = value_head(picked)
        return ModelOutput(values.new_zeros(len(batch)), values=spread(values))
    weight, how = _head(model, shards)
    targets = batch.tokens.to(picked.device)[trained]
    logprobs, entropy = token_logprobs(
        picked, weight, targets, batch.distribution, with_entropy="entropy" in outputs, **how
    )
    output = ModelOutput(spread(logprobs), entropy=None if entropy is None else spread(entropy))
    if "topk" in outputs:
        ids = batch.column("topk_ids").to(picked.device)[trained]
        output.topk = spread(ids_logprobs(picked, weight, ids, batch.distribution, **how))
    return output


def likeliest(
    model: nn.Module, batch: Batch, top: Top, shards: Shards = WHOLE, passage: Passage | None = None
) -> tuple[Tensor, Tensor]:
    """The ``top.k`` likeliest tokens (all, where there are fewer) at each place and their log-probs under the batch's
    distribution: ([N, K] int64, [N, K]), likeliest first, 0 where untrained."""
    picked, trained = _predicting(model, batch, shards, passage)
    weight, how = _head(model, shards)
    found = topk_logprobs(picked, weight, top.k, batch.distribution, below=top.below, **how)
    ids, logprobs = (
        shards.tokens.combine(rows.new_zeros(len(batch), rows.shape[1]).index_copy(0, trained, rows)) for rows in found
    )
    return ids, logprobs


def _predicting(model: nn.Module, batch: Batch, shards: Shards, passage: Passage | None) -> tuple[Tensor, Tensor]:
    """The hidden states that predict trained tokens, [T, H], and where those tokens are, [T]; of tokens that are spread
    over ranks, this rank's share."""
    hidden = forest_hidden(model, batch, shards.tokens, passage)
    trained = shards.tokens.share(batch.trained.to(hidden.device).nonzero().squeeze(1))
    # index_select, because its backward sums the children of one predictor in a fixed order.
    return hidden.index_select(0, batch.predictor.to(hidden.device)[trained]), trained


def _head(model: nn.Module, shards: Shards) -> tuple[Tensor, dict[str, Any]]:
    """The output matrix, or the part of it that is here, and what else log-probs depend on."""
    head, vocabulary = head_of(model), shards.vocabulary
    bias = None if head.bias is None else vocabulary.local(head.bias)
    how = {"bias": bias, "scale": head.scale, "softcap": head.softcap, "vocabulary": vocabulary}
    return vocabulary.local(head.weight), how
