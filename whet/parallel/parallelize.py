"""``parallelize`` distributes a model over the ranks of a learner. Independent of the learner.

The model is built without memory on every rank, sharded, and filled from rank 0, the only rank that reads the weights.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.models.attention.forest import NAME, decoder_of, unwrapped
from whet.models.images import of_tower
from whet.models.shards import Parameters, Shards, Tokens, Vocabulary
from whet.models.stages import Placeholder, check_stages, drop_other_layers, layers_of, stages_of
from whet.parallel.context import SpreadTokens, TokensInParts
from whet.parallel.experts import check_experts, spread_experts
from whet.parallel.fsdp import shard
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import copy_from_first
from whet.parallel.pipeline import stages_of_rank
from whet.parallel.tensor import SpreadVocabulary, TowerOnEachRank, spread_matrices

Root = TypeVar("Root", bound=nn.Module)


def parallelize(
    build: Callable[[torch.device], Root], ranks: Ranks, *, bfloat16: bool, trains: bool
) -> tuple[Root, Shards]:
    """Build a module that is distributed over the ranks; return it and the layout of its work.

    ``build(device)`` returns the whole module, on the CPU with weights or on ``meta`` without. Its ``model`` is the
    language model, which is called only through the module's forward pass; its other parts process the last layer's
    output. If it has ``images``, the model reads images. See ``shard`` for ``bfloat16``.

    Raises ``WhetError`` on every rank if one of them can't build it.
    """
    source: Root | None = None
    with ranks.fail_together("loading the model"):
        if ranks.info.rank == 0:
            source = build(torch.device("cpu"))
        root = build(torch.device("meta"))
        model = root.get_submodule("model")
        for size in ("context", "pipeline"):
            if getattr(ranks.config, size) > 1 and decoder_of(model).config._attn_implementation != NAME:
                raise WhetError(
                    f"{type(unwrapped(model)).__name__} has layers other than plain attention, so its sequences can't "
                    f"be split; set parallel.{size} to 1"
                )
        mixture = check_experts(model, ranks.config)
        if ranks.config.pipeline > 1:
            reads_images = getattr(root, "images", None) is not None
            checked = unwrapped((root if source is None else source).get_submodule("model"))
            check_stages(checked, ranks.config.stages, reads_images)
        if ranks.config.tensor > 1:
            spread_matrices(model, ranks.tensor, ranks.config.sequence_parallel)
        if ranks.config.pipeline > 1:
            keep_own_stages(root, ranks)
    output, embeddings = unwrapped(model).get_output_embeddings(), unwrapped(model).get_input_embeddings()
    tied = output.weight is embeddings.weight and output.weight is not None
    own_mesh = spread_experts(model, ranks) if mixture else []
    layers = [layer for layer in layers_of(decoder_of(model))[1] if not isinstance(layer, Placeholder)]
    shard(root, layers, ranks, bfloat16=bfloat16, trains=trains, own_mesh=own_mesh)
    offloaded = ranks.config.cpu_offload and ranks.device.type != "meta"
    root.to_empty(device="cpu" if offloaded else ranks.device)
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(ranks.device))  # never offloaded
    if tied:
        output.weight = embeddings.weight
    copy_from_first(root, source, ranks)
    return root, _shards_of(model, ranks)


def keep_own_stages(root: nn.Module, ranks: Ranks) -> None:
    """Drop the layers of other stages, after matrices were split, which needs the whole model."""
    model = unwrapped(root.get_submodule("model"))
    stages = stages_of_rank(stages_of(model.get_decoder(), ranks.config.stages), ranks)
    drop_other_layers(model, stages)
    for name, _ in list(root.named_children()):
        if name != "model" and not stages[-1].last:
            setattr(root, name, None)


def _shards_of(model: nn.Module, ranks: Ranks) -> Shards:
    """Return the layout of a distributed model's work."""
    vocabulary = Vocabulary()
    head: Tensor | None = unwrapped(model).get_output_embeddings().weight
    if ranks.config.tensor > 1 and head is not None:
        vocabulary = SpreadVocabulary(ranks.tensor, head.shape[0])
    parameters = Parameters()
    if ranks.config.tensor > 1 and (tower := of_tower(model)):
        parameters = TowerOnEachRank(ranks.tensor, tower, ranks.config.sequence_parallel)
    return Shards(tokens_of(ranks), vocabulary, parameters)


def tokens_of(ranks: Ranks) -> Tokens:
    """Return the layout of a batch's tokens over the ranks."""
    cut = ranks.config.tensor if ranks.config.sequence_parallel else 1
    part = ranks.tensor.get_local_rank() if cut > 1 else 0
    if ranks.config.context > 1:
        return SpreadTokens(ranks.context, cut, part)
    return TokensInParts(cut, part) if cut > 1 else Tokens()
