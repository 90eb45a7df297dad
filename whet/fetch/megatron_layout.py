"""Tensors in checkpoints of Megatron Core as Hugging Face's: names, the order of heads, and layers in one tensor.

Where layers are alike, ``decoder.layers.mlp.linear_fc2.weight`` has the matrices of all layers, [layers, ...]; else
each layer has its own, ``decoder.layers.N.mlp.linear_fc2.weight``. Experts are one tensor, [experts, ...], and so are
gate and up. This is Megatron Core's default, in any parallelism, and is written. Its option
``singleton_local_shards``, which is also read, numbers layers and experts, and stores gate and up as ``_w`` and
``_v``. Imports no Megatron Core.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from whet.base.errors import WhetError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
"""The ``model_type`` of models whose layers Megatron Core has as well."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Tensors of a layer there, and the Hugging Face tensors that each holds. Some norms have two names, because Transformer
# Engine's layers have them in the next projection.
_LAYER: dict[str, tuple[str, ...]] = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"{name}.weight" for name in _QKV),
    "self_attention.linear_qkv.bias": tuple(f"{name}.bias" for name in _QKV),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.experts.experts.linear_fc1.weight": ("mlp.experts.gate_up_proj",),
    "mlp.experts.experts.linear_fc2.weight": ("mlp.experts.down_proj",),
}
_LATENT: dict[str, tuple[str, ...]] = {
    "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
}  # of DeepSeek-V3
_REST = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_PART = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+?)(?:_([wv]))?")
_EXPERT = re.compile(r"(mlp\.experts\.experts\.)(\d+)\.(.+)")


def join_heads(pieces: "list[Tensor]", groups: int) -> "Tensor":
    """Return queries, keys and values as one tensor, in which the heads of each group are next to each other."""
    import torch

    rest = pieces[0].shape[1:]
    return torch.cat([piece.reshape(groups, -1, *rest) for piece in pieces], 1).flatten(0, 1)


def split_heads(tensor: "Tensor", groups: int, heads: int) -> "list[Tensor]":
    """Return queries, keys and values of a joined tensor; ``heads``: of queries in a group."""
    by_group = tensor.unflatten(0, (groups, heads + 2, -1))
    return [part.flatten(0, 2) for part in by_group.split([heads, 1, 1], 1)]


def is_weight(key: str) -> bool:
    """Return whether a key of a checkpoint is a weight of the model, and no state of an optimizer or a random
    generator, or of a layer in 8 bits."""
    return key.startswith(("embedding.", "decoder.", "output_layer.", "mtp.")) and "._extra_state" not in key


def from_megatron(tensors: "Iterable[tuple[str, Tensor]]", hf: "PretrainedConfig") -> "dict[str, Tensor]":
    """Return Hugging Face's tensors for the tensors of a checkpoint, by key. ``hf`` is the model's Hugging Face config.
    Raises ``WhetError`` for a key that has no counterpart."""
    import torch

    table = _table(hf)
    weights: dict[str, Tensor] = {}
    parts: dict[tuple[int, str], dict[int, dict[str, Tensor]]] = {}  # of a layer's tensor, by expert (-1: all) and half
    for key, tensor in tensors:
        if key in _REST:
            padded = key != "decoder.final_layernorm.weight"  # to a size that ranks divide
            weights[_REST[key]] = tensor[: hf.vocab_size] if padded else tensor
            continue
        matched = _PART.fullmatch(key)
        number, name, half = matched.groups() if matched else (None, key, None)
        numbered = _EXPERT.fullmatch(name)
        expert, name = (int(numbered[2]), numbered[1] + numbered[3]) if numbered else (-1, name)
        if name not in table:
            raise WhetError(f"{key} has no counterpart in a {hf.model_type} model of Hugging Face")
        for layer, part in enumerate(tensor) if number is None else [(int(number), tensor)]:
            parts.setdefault((layer, name), {}).setdefault(expert, {})[half or ""] = part
    for (layer, name), experts in parts.items():
        joined = [_whole(experts[number]) for number in sorted(experts)]
        whole = joined[0] if -1 in experts else torch.stack(joined)
        for other, tensor in zip(table[name], _split(name, whole, hf), strict=True):
            weights[f"model.layers.{layer}.{other}"] = tensor
    return weights


def to_megatron(tensors: "Mapping[str, Tensor]", hf: "PretrainedConfig") -> "Iterator[tuple[str, Tensor]]":
    """Yield the tensors of a checkpoint, by key, for Hugging Face's. Raises ``WhetError`` for one that has no
    counterpart."""
    import torch

    left = set(tensors) - set(_REST.values())
    layers: list[dict[str, list[str]]] = []
    for number in range(hf.num_hidden_layers):
        named = {name: [f"model.layers.{number}.{part}" for part in parts] for name, parts in _table(hf).items()}
        layers.append({name: parts for name, parts in named.items() if tensors.keys() >= set(parts)})
        left.difference_update(*layers[-1].values())
    if left:
        raise WhetError(f"Megatron Core's checkpoints have no {min(left)} of {hf.model_type} models")
    for key, other in _REST.items():
        if other in tensors and not (other == "lm_head.weight" and hf.tie_word_embeddings):
            yield key, tensors[other]
    alike = all(layer.keys() == layers[0].keys() for layer in layers)
    for number, layer in enumerate(layers):
        for name, parts in layer.items():
            if not alike:
                yield f"decoder.layers.{number}.{name}", _join(name, [tensors[part] for part in parts], hf)
            elif number == 0:
                whole = [_join(name, [tensors[part] for part in each[name]], hf) for each in layers]
                yield f"decoder.layers.{name}", torch.stack(whole)


def _table(hf: "PretrainedConfig") -> dict[str, tuple[str, ...]]:
    """Return the tensors of a layer, as above, of a model's family."""
    return _LAYER | _LATENT if hf.model_type == "deepseek_v3" else _LAYER


def _whole(halves: "dict[str, Tensor]") -> "Tensor":
    import torch

    return halves[""] if "" in halves else torch.cat([halves["w"], halves["v"]], -2)


def _join(name: str, pieces: "list[Tensor]", hf: "PretrainedConfig") -> "Tensor":
    import torch

    return join_heads(pieces, hf.num_key_value_heads) if "linear_qkv" in name and len(pieces) > 1 else torch.cat(pieces)


def _split(name: str, tensor: "Tensor", hf: "PretrainedConfig") -> "list[Tensor]":
    pieces = _table(hf)[name]
    if "linear_qkv" in name and len(pieces) > 1:
        return split_heads(tensor, hf.num_key_value_heads, hf.num_attention_heads // hf.num_key_value_heads)
    return list(tensor.chunk(len(pieces)))
