"""The model of a learner with its head, as one module: all of it on this rank's device, or this rank's part of it."""

from collections.abc import Set
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
from whet.models.config import ModelConfig
from whet.models.loading import load_model
from whet.models.shards import WHOLE, Shards
from whet.models.values import ValueHead
from whet.parallel.mesh import Ranks
from whet.parallel.parallelize import parallelize


class Scorer(nn.Module):
    """``forward`` as a module, so that what is hooked around a module (sharded parameters) works around all of it: a
    model's head is read there, not called."""

    def __init__(self, model: nn.Module, value_head: ValueHead | None, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.model, self.value_head, self.shards = model, value_head, shards

    def forward(self, batch: Batch, needs: Set[str], top: Top | None = None) -> dict[str, Tensor | None]:
        """The fields of a ``ModelOutput``, or with ``top`` the columns ``teacher_ids`` and ``teacher_logprobs``. A
        mapping, because hooks find tensors in plain containers only."""
        if top is not None:
            ids, logprobs = likeliest(self.model, batch, top, self.shards)
            return {"teacher_ids": ids, "teacher_logprobs": logprobs}
        output = forward(self.model, batch, needs, self.value_head, self.shards)
        return {field.name: getattr(output, field.name) for field in fields(output)}


def build_scorer(
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    ranks: Ranks | None = None,
    *,
    train: bool,
    value_head: bool = False,
    seed: int = 0,
) -> Scorer:
    """See ``load_model`` for ``train`` and ``seed``; of several ranks, all must call this together."""
    build = partial(_build, config, precision, train, value_head, seed)
    if ranks is None:
        return build(torch.device("cpu")).to(device)
    scorer, shards = parallelize(build, ranks, narrow=precision == "bfloat16", trains=train)
    scorer.shards = shards
    return scorer


def _build(
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
