"""The model of a learner with its head, as one module: all of it on this rank's device, or this rank's part of it."""

from collections.abc import Iterator, Set
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.batch import Batch
from whet.learner.base import Top
from whet.learner.config import Precision
from whet.learner.forward import forward, likeliest
from whet.learner.precision import shrink, weight_dtype
from whet.models.compiled import compile_layers
from whet.models.config import ModelConfig
from whet.models.forest_attention import forest_hidden
from whet.models.loading import load_model
from whet.models.shards import WHOLE, Shards
from whet.models.stages import Passage
from whet.models.values import ValueHead
from whet.parallel.mesh import Ranks
from whet.parallel.parallelize import parallelize
from whet.parallel.pipeline import Pipeline


class Scorer(nn.Module):
    """``forward`` as a module, so that what is hooked around a module (sharded parameters) works around all of it: a
    model's head is read there, not called."""

    def __init__(self, model: nn.Module, value_head: ValueHead | None, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.model, self.value_head, self.shards = model, value_head, shards
        self.pipeline: Pipeline | None = None  # where some of the layers are on other ranks

    def forward(
        self, batch: Batch, outputs: Set[str], top: Top | None = None, passage: Passage | None = None
    ) -> dict[str, Tensor | None]:
        """The fields of a ``ModelOutput``, or with ``top`` ``topk_ids`` and ``topk``; at a
        stage that is not the last one ``hidden``. A mapping, because hooks find tensors in plain containers only."""
        if passage is not None and not passage.stage.last:
            return {"hidden": forest_hidden(self.model, batch, self.shards.tokens, passage)}
        if top is not None:
            ids, logprobs = likeliest(self.model, batch, top, self.shards, passage)
            return {"topk_ids": ids, "topk": logprobs}
        output = forward(self.model, batch, outputs, self.value_head, self.shards, passage)
        return {field.name: getattr(output, field.name) for field in fields(output)}

    def counted(self) -> Iterator[nn.Parameter]:
        """The parameters that are here, without the copies that another stage of a pipeline counts."""
        copy = None if self.pipeline is None else self.pipeline.copy
        return (parameter for parameter in self.parameters() if parameter is not copy)

    def sizes(self) -> tuple[int, int]:
        """How many numbers the parameters are, and how many of them are trained; all ranks must ask together."""
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self.counted()]
        counts = (sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))
        return counts if self.pipeline is None else self.pipeline.sum(counts)


def build_scorer(
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    ranks: Ranks | None = None,
    *,
    train: bool,
    value_head: bool = False,
    seed: int = 0,
    compiled: bool = False,
) -> Scorer:
    """See ``load_model`` for ``train`` and ``seed``; of several ranks, all must call this together."""
    build = partial(build_whole, config, precision, train, value_head, seed)
    if ranks is None:
        scorer = build(torch.device("cpu")).to(device)
    else:
        scorer, shards = parallelize(build, ranks, narrow=precision == "bfloat16", trains=train)
        scorer.shards = shards
        if ranks.config.pipeline > 1:
            scorer.pipeline = Pipeline(scorer.model, shards.tokens, ranks)
    if compiled:
        compile_layers(scorer.model, device)
    return scorer


def build_whole(
    config: ModelConfig, precision: Precision, train: bool, value_head: bool, seed: int, device: torch.device
) -> Scorer:
    """On the CPU with its weights, or on ``meta`` without."""
    dtype = weight_dtype(precision)
    model: Any = load_model(config, dtype=dtype, train=train, seed=seed, empty=device.type == "meta")
    if not train:
        shrink(model, precision)
    if not value_head:
        return Scorer(model, None)
    output = model.get_output_embeddings()
    if output.weight is not model.get_input_embeddings().weight:
        output.requires_grad_(False)  # nobody reads its logits
    head = ValueHead(model.config.get_text_config().hidden_size, seed=seed, device=device)
    return Scorer(model, head.to(dtype).requires_grad_(train))
