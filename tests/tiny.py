"""Tiny random models for tests: built in memory, no download, a function of the seed alone."""

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from whet.models.tiny import CHAT_TEMPLATE, SPECIAL, VOCAB, tiny_tokenizer, vocab_id

__all__ = ["CHAT_TEMPLATE", "SPECIAL", "VOCAB", "tiny_tokenizer", "vocab_id"]


def tiny_llama(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """2 layers, 4 heads of size 32 over 2 key-value heads, untied. ``changes`` go to the config."""
    return _build(LlamaForCausalLM, LlamaConfig(**_sizes(vocab, changes)), dtype, seed)


def tiny_qwen3(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same sizes with query and key norms and tied embeddings."""
    return _build(Qwen3ForCausalLM, Qwen3Config(**_sizes(vocab, {"tie_word_embeddings": True, **changes})), dtype, seed)


def tiny_qwen2(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same sizes with biases of queries, keys and values, which are not 0."""
    model = _build(Qwen2ForCausalLM, Qwen2Config(**_sizes(vocab, changes)), dtype, seed)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1, generator=random)
    return model


def tiny_gemma(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same sizes; the first layer sees a sliding window of 8 tokens, the second everything."""
    gemma = {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    }
    return _build(Gemma3ForCausalLM, Gemma3TextConfig(**_sizes(vocab, {**gemma, **changes})), dtype, seed)


def tiny_qwen3_moe(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same sizes; a dense layer, then one of 4 experts, 2 for each token."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**_sizes(vocab, {**experts, **changes}))
    return _build(Qwen3MoeForCausalLM, config, dtype, seed)


def tiny_mixtral(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same sizes, 4 experts in each layer, 2 for each token."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _build(MixtralForCausalLM, MixtralConfig(**_sizes(vocab, {**experts, **changes})), dtype, seed)


def tiny_gpt_oss(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same sizes; attention sinks, a window, and 4 experts with biases, 2 for each token."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    model = _build(GptOssForCausalLM, GptOssConfig(**_sizes(vocab, {**experts, **changes})), dtype, seed)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers begins with zeros
            torch.nn.init.normal_(parameter, std=0.3, generator=random)
    return model


def tiny_deepseek(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same width; latent attention, a dense layer, then one of 8 experts in 4 groups next to a shared one."""
    own = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
    }
    own |= {name: changes[name] for name in own if name in changes and name != "head_dim"}
    sizes = _sizes(vocab, {**changes, **own})
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return _build(DeepseekV3ForCausalLM, DeepseekV3Config(**sizes), dtype, seed)


def tiny_qwen3_5(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same sizes; a layer of linear attention (gated delta rule), then one of attention."""
    linear = {
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2),
        **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    }
    return _build(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_sizes(vocab, {**linear, **changes})), dtype, seed)


def tiny_granite(
    vocab: int = VOCAB, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same width; a recurrent layer (Mamba 2), then one of attention, each with 4 experts, 2 for each token."""
    own = {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    }
    return _build(GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(**_sizes(vocab, {**own, **changes})), dtype, seed)


def _sizes(vocab: int, changes: dict[str, Any]) -> dict[str, Any]:
    eos = vocab_id("<|im_end|>")
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos if eos < vocab else None,
        "pad_token_id": vocab_id("<|endoftext|>") if eos < vocab else None,
    }
    return {**sizes, **changes}


def _build(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    return model.to(dtype).eval()
