"""Tiny random models of all causal families of transformers: 32 wide, two layers, whatever else a family needs."""

import inspect
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Each where a family's config has it, under whichever name.
SIZES: dict[str, Any] = {
    "vocab_size": 264, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0,
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"], 32),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_hidden_size"], 48),
    **dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 64),
    "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 8, "sliding_window": 6, "attention_chunk_size": 8,
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 24),
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "max_window_layers": 1,
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264, "state_size": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
ROC_SIZES = ["pronunciation_vocab_size", "shape_vocab_size", "pronunciation_embed_dim", "shape_embed_dim"]
MORE: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    **dict.fromkeys(["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"], LINEAR),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "roc_bert": dict.fromkeys(ROC_SIZES, 8),
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}
NOT_SET = {"falcon": {"head_dim"}, "prophetnet": {"num_hidden_layers"}, "xlnet": {"max_position_embeddings"}}
NOT_SET["xlstm"] = {"v_head_dim"}
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> PretrainedConfig:
    return _config(CONFIG_MAPPING[family], family)


def _config(kind: type[PretrainedConfig], family: str = "") -> PretrainedConfig:
    known = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map, *vars(kind())} - NOT_SET.get(
        family, set()
    )
    own = {name: size for name, size in SIZES.items() if name in known}
    if {"kv_lora_rank", "qk_rope_head_dim"} <= own.keys():
        own["num_key_value_heads"] = 4  # latent attention has as many as queries
    parts = {name: _config(part) for name, part in kind.sub_configs.items() if part is not AutoConfig}
    return kind(**own | parts | MORE.get(family, {}))


def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Raises whatever stands in the way; for what is not tiny, ``ValueError``."""
    config = tiny_config(family)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > 3_000_000:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():  # larger and nowhere constant, so that what is wrong shows
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.1) if parameter.dim() < 2 else parameter.mul_(3)
    return model.to(dtype)
