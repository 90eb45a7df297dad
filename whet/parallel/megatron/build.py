"""Build a model of Megatron Core's layers on this rank, with the weights of a Hugging Face model, which only the first
rank reads."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from whet.base.errors import WhetError
from whet.models.attention.forest import decoder_of, unwrapped
from whet.models.images import of_tower
from whet.models.moe.experts import experts_of
from whet.models.shards import WHOLE, Shards
from whet.models.stages import Placeholder, check_stages, layers_of
from whet.parallel.config import ParallelConfig
from whet.parallel.experts import check_experts
from whet.parallel.fsdp import shard
from whet.parallel.megatron.experts import Experts, expert_groups
from whet.parallel.megatron.families import unsupported
from whet.parallel.megatron.lora import adapters_of, add_adapters
from whet.parallel.megatron.model import MegatronModel
from whet.parallel.megatron.parameters import MegatronParameters, shard_dim, stays_whole
from whet.parallel.megatron.settings import rotary_of, shared_size, transformer_config
from whet.parallel.megatron.stand_ins import OneRank, apply_stand_ins
from whet.parallel.mesh import Ranks, fail_together
from whet.parallel.parallelize import keep_own_stages, tokens_of
from whet.parallel.parameters import copy_part
from whet.parallel.tensor import SpreadVocabulary

Root = TypeVar("Root", bound=nn.Module)


def build_megatron(
    build: Callable[[torch.device], Root], ranks: Ranks | None, device: torch.device, whole: bool = False
) -> tuple[Root, Shards]:
    """Build a module as ``parallelize`` does, with a ``MegatronModel`` as its ``model``. ``whole``: nothing is sharded
    over the ranks with other data. Raises ``WhetError`` on every rank if one of them can't build it."""
    apply_stand_ins()
    if ranks is not None:
        ranks.experts(ranks.config.expert)  # collective, so before anything that a rank may do alone
    source: Root | None = None
    with fail_together(ranks, "loading the model"):
        if ranks is None or ranks.info.rank == 0:
            source = build(torch.device("cpu"))
        root = build(torch.device("meta"))
        trained = {name: parameter.requires_grad for name, parameter in _named(root)}
        plain: Any = root.get_submodule("model")
        reads_images = getattr(root, "images", None) is not None
        if ranks is not None and ranks.config.pipeline > 1:
            check_stages(unwrapped(plain), ranks.config.stages, reads_images)
        adapters = adapters_of(plain)
        model = _empty(plain, ranks, adapters)
        if adapters:
            plain.base_model.model = model
        else:
            root.model = model
        if ranks is not None and ranks.config.pipeline > 1:
            keep_own_stages(root, ranks)
    if ranks is not None and not whole:
        _shard(root, model, ranks)
    root.to_empty(device=device)
    model.tie()
    decoder = model.get_decoder()
    decoder.set_rotary(rotary_of(decoder.config))
    parameters = MegatronParameters(decoder.config, ranks, adapters, of_tower(root.get_submodule("model")))
    model.stored = parameters.stored
    for name, parameter in _named(root):
        parameter.requires_grad_(trained[parameters.names(name)[0]])
    _fill(root, source, parameters, ranks, device)
    tokens, vocabulary = (WHOLE.tokens if ranks is None else tokens_of(ranks)), WHOLE.vocabulary
    if ranks is not None and ranks.config.tensor > 1:
        vocabulary = SpreadVocabulary(ranks.tensor, decoder.config.vocab_size)
    return root, Shards(tokens, vocabulary, parameters)


def _empty(plain: nn.Module, ranks: Ranks | None, adapters: dict[str, Any]) -> MegatronModel:
    """Return the model on ``meta``, with this rank's part of every matrix; PEFT's layers are moved into it."""
    whole = unwrapped(plain)
    theirs = decoder_of(whole)
    hf, weight = theirs.config, theirs.get_input_embeddings().weight
    if why := unsupported(whole.config):
        raise WhetError(f"learner.type=megatron can't build this model: {why}; use learner.type=torch")
    size = ParallelConfig() if ranks is None else ranks.config
    check_experts(plain, size)
    blocks = [_mixture_of(layer) for layer in layers_of(theirs)[1]]
    cut = {key: getattr(hf, key) for key in ("num_key_value_heads", "num_attention_heads", "vocab_size")}
    if None in blocks:
        cut["intermediate_size"] = hf.intermediate_size
    if shared := shared_size(hf):
        cut["moe_intermediate_size x n_shared_experts"] = shared
    for key, value in cut.items():
        if value % size.tensor:
            raise WhetError(f"parallel.tensor = {size.tensor} does not divide {key} = {value}; choose another size")
    if hasattr(hf, "kv_lora_rank") and size.tensor > 1 and not size.sequence_parallel:
        raise WhetError(
            f"{hf.model_type} has latent attention, whose latents each rank computes for its own tokens with "
            "parallel.tensor, so parallel.sequence_parallel must be true"
        )
    settings = transformer_config(hf, weight.dtype, size)
    single = OneRank()
    split = single if ranks is None or size.tensor == 1 else ranks.tensor.get_group()
    groups = ProcessGroupCollection(tp=split, cp=single, pp=single, **expert_groups(ranks, single))
    with torch.device("meta"):
        model = MegatronModel(whole, settings, groups, blocks)
        for number, layer in enumerate(model.get_decoder().layers):
            inside = f"{model.inside}.layers.{number}."
            inner = {name.removeprefix(inside): part for name, part in adapters.items() if name.startswith(inside)}
            add_adapters(layer, inner, settings, split)
    return model.train(plain.training)


def _shard(root: nn.Module, model: MegatronModel, ranks: Ranks) -> None:
    """Shard parameters over the ranks with other data, as FSDP does. LoRA and joined biases, which are small, are not
    sharded."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    mesh = ranks.experts(ranks.config.expert)
    copies = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "expert")]
    shard(
        root,
        [layer for layer in model.get_decoder().layers if not isinstance(layer, Placeholder)],
        ranks,
        bfloat16=False,
        trains=root.training,
        own_mesh=[(module, copies) for module in model.modules() if isinstance(module, Experts)],
        placement=lambda parameter, size: Shard(shard_dim(names[id(parameter)], parameter, size)),
        whole=[p for name, p in root.named_parameters() if stays_whole(name)],
    )


def _mixture_of(layer: nn.Module) -> nn.Module | None:
    """Return the module of a Hugging Face layer that has its experts and their router; None for a dense layer."""
    name = next((name for name, _ in experts_of(layer)), None)
    return None if name is None else layer.get_submodule(name.rpartition(".")[0])


def _named(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the model and of other parts, by the names under which they are stored."""
    return [(name.removeprefix("model."), parameter) for name, parameter in root.named_parameters()]


def _filled(root: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers, by the names under which they are stored."""
    buffers = ((name.removeprefix("model."), buffer) for name, buffer in root.named_buffers())
    return dict([*_named(root), *buffers])


@torch.no_grad()
def _fill(
    root: nn.Module, source: nn.Module | None, parameters: MegatronParameters, ranks: Ranks | None, device: torch.device
) -> None:
    """Fill the parameters, and the buffers that ``source`` has too, which only rank 0 has. One tensor at a time is
    broadcast."""
    targets = _filled(root)
    owner = {other: name for name in targets for other in parameters.names(name)}
    full = {} if source is None else _filled(source)
    listed = [(name, tensor.shape, tensor.dtype) for name, tensor in full.items()]
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, shape, dtype in listed if ranks is None else ranks.broadcast(listed):
        moving = full[name].to(device) if name in full else torch.empty(shape, dtype=dtype, device=device)
        if ranks is not None:
            dist.broadcast(moving, src=0)
        if (target := owner.get(name)) is None:
            continue
        pieces = waiting.setdefault(target, {})
        pieces[name] = parameters.own_piece(target, moving)
        names = parameters.names(target)
        if len(pieces) == len(names):
            copy_part(targets[target], parameters.joined(target, [pieces[name] for name in names]))
            del waiting[target]
