"""LoRA of PEFT on Megatron Core's parallel linear layers (arXiv 2106.09685).

PEFT's layers of the Hugging Face model, without their matrices, become modules of Megatron Core's layer under the names
that they have there, such as ``self_attn.q_proj``. So adapters are stored, sent and exported like any others. What they
add to the output of a joined matrix is joined in the same way. Tensor parallelism cuts A of a matrix that is cut by its
inputs, and B of one that is cut by its outputs; the other of the two is the same on all ranks, and so are both of a
matrix that is not cut.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.parallel.megatron.families import BY_INPUTS, BY_OUTPUTS, NAMES, UNCUT
from whet.parallel.megatron.stand_ins import Group

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear


def adapters_of(model: nn.Module) -> dict[str, "LoraLinear"]:
    """Return PEFT's layers of a Hugging Face model, by the names of the modules that they adapt. Raises ``WhetError``
    if one of them adapts another module than a linear layer, or in another way."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import Linear, LoraLayer

    wrapped: Any = model
    layers = {name: part for name, part in wrapped.get_base_model().named_modules() if isinstance(part, LoraLayer)}
    linear = {other for module in BY_OUTPUTS + BY_INPUTS + UNCUT for other in NAMES[module]}
    for name, part in layers.items():
        within = name.partition(".layers.")[2].partition(".")[2]  # a layer
        if type(part) is not Linear or any(part.use_dora.values()) or within not in linear:
            raise WhetError(
                f"learner.type=megatron can't adapt {name} as model.lora says: it has plain LoRA for linear layers of "
                "attention and of dense feed-forwards; change model.lora, or use learner.type=torch"
            )
    return layers


def add_adapters(
    layer: nn.Module, adapters: Mapping[str, "LoraLinear"], settings: TransformerConfig, tensor: Group
) -> None:
    """Move PEFT's layers, by their names in a layer of the Hugging Face model, into Megatron Core's ``layer`` and let
    its matrices use them. ``tensor``: the group of tensor-parallel ranks."""
    present = {name for name, _ in layer.named_modules()}
    for module in (module for module in BY_OUTPUTS + BY_INPUTS + UNCUT if module in present):
        parts = [adapters.get(name) for name in NAMES[module]]
        if not any(part is not None for part in parts):
            continue
        added: Callable[[Any, str, Tensor], Tensor] = _of_own_tokens
        if module not in UNCUT:
            by_outputs = module in BY_OUTPUTS
            added = partial(_of_outputs if by_outputs else _of_inputs, settings.sequence_parallel, tensor)
        for name, part in zip(NAMES[module], parts, strict=True):
            if part is not None:
                del part.base_layer
                if module not in UNCUT:
                    _cut(part.lora_B if by_outputs else part.lora_A, 0 if by_outputs else 1, settings)
                _place(layer, name, part)
        groups, shares = _shares(module, settings)
        layer.get_submodule(module).register_forward_hook(partial(_add, parts, groups, shares, added))


def _cut(matrices: nn.ModuleDict, dim: int, settings: TransformerConfig) -> None:
    for linear in matrices.values():
        weight: Any = linear.weight
        part = weight.detach().chunk(settings.tensor_model_parallel_size, dim)[0]
        linear.weight = nn.Parameter(torch.empty_like(part), weight.requires_grad)


def _place(layer: nn.Module, name: str, part: nn.Module) -> None:
    block, _, last = name.partition(".")
    if not hasattr(layer, block):
        layer.add_module(block, nn.Module())
    layer.get_submodule(block).add_module(last, part)


def _shares(module: str, settings: TransformerConfig) -> tuple[int, list[int]]:
    """Return the number of groups of this rank's outputs, and each part's share of the outputs."""
    if module == "self_attention.linear_qkv":
        heads = settings.num_attention_heads // settings.num_query_groups
        return settings.num_query_groups // settings.tensor_model_parallel_size, [heads, 1, 1]
    return 1, [1] * len(NAMES[module])


def _add(
    parts: list[Any],
    groups: int,
    shares: list[int],
    added: Callable[[Any, str, Tensor], Tensor],
    _: nn.Module,
    inputs: tuple[Tensor, ...],
    output: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Return the output of a matrix, [n, 1, outputs], with what its adapters add."""
    pieces = []
    for part, share in zip(parts, shares, strict=True):
        piece = output[0].new_zeros(*output[0].shape[:-1], output[0].shape[-1] * share // sum(shares))
        for name in () if part is None or part.disable_adapters else part.active_adapters:
            piece = piece + added(part, name, part.lora_dropout[name](inputs[0])) * part.scaling[name]
        pieces.append(piece.unflatten(-1, (groups, -1)))
    return output[0] + torch.cat(pieces, -1).flatten(-2), output[1]


def _of_outputs(sequence_parallel: bool, tensor: Any, part: Any, name: str, hidden: Tensor) -> Tensor:
    """Return B A of hidden states whose tokens may be split, as the output of a matrix that is cut by its outputs."""
    low = part.lora_A[name](hidden)
    whole = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
    result: Tensor = part.lora_B[name](whole(low, group=tensor))
    return result


def _of_inputs(sequence_parallel: bool, tensor: Any, part: Any, name: str, hidden: Tensor) -> Tensor:
    """Return B A of hidden states whose last dimension is split, as the output of a matrix that is cut by its inputs;
    the tokens may then be split."""
    low = part.lora_A[name](hidden)
    reduced = (
        reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_tensor_model_parallel_region
    )
    result: Tensor = part.lora_B[name](reduced(low, group=tensor))
    return result


def _of_own_tokens(part: Any, name: str, hidden: Tensor) -> Tensor:
    """Return B A of hidden states, as the output of a matrix that each rank applies to its own tokens."""
    result: Tensor = part.lora_B[name](part.lora_A[name](hidden))
    return result
