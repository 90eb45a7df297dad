"""Megatron Core's settings for the model of a Hugging Face config, and its rotary embedding."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from whet.models.moe.routing import COUNTS, has_experts
from whet.parallel.config import ParallelConfig
from whet.parallel.megatron.families import has_joined_biases

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def transformer_config(hf: "PretrainedConfig", dtype: torch.dtype, size: ParallelConfig) -> TransformerConfig:
    """Return Megatron Core's settings. Its pipeline and context are always 1: whet splits layers and tokens."""
    heads = hf.num_attention_heads
    experts: dict[str, Any] = {}
    if has_experts(hf):
        experts = {
            "num_moe_experts": next(getattr(hf, name) for name in COUNTS if hasattr(hf, name)),
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
            "moe_router_pre_softmax": True,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": size.expert,
        }
    if shared := shared_size(hf):
        experts["moe_shared_expert_intermediate_size"] = shared
    kind, latent = TransformerConfig, {}
    if hasattr(hf, "kv_lora_rank"):
        kind, latent = MLATransformerConfig, _latent(hf)
    return kind(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=has_joined_biases(hf),
        qk_layernorm=hf.model_type.startswith("qwen3"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,  # its buffers sum gradients over the data and don't average them
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=size.tensor,
        sequence_parallel=size.sequence_parallel and size.tensor > 1,
        use_cpu_initialization=True,
        perform_initialization=False,
        **experts,
        **latent,
    )


def shared_size(hf: "PretrainedConfig") -> int:
    """Return the intermediate size of the expert that all tokens share; 0 if there is none."""
    return (getattr(hf, "n_shared_experts", 0) or 0) * getattr(hf, "moe_intermediate_size", 0)


def _latent(hf: "PretrainedConfig") -> dict[str, Any]:
    """Return the settings of latent attention. Its angles are given to it; ``mscale`` multiplies their sines and
    cosines, and the other two make the scale of the softmax."""
    rope = hf.rope_parameters
    yarn = rope.get("rope_type", "default") == "yarn"
    return {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rope_type": "yarn",  # which for a factor of 1 is the default type
        "rotary_scaling_factor": rope["factor"] if yarn else 1.0,
        "mscale": rotary_of(hf).attention_scaling,
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0) if yarn else 0.0,
    }


def rotary_of(hf: "PretrainedConfig") -> Any:
    """Return transformers' rotary embedding for a config, with its frequencies, [size / 2] float32."""
    from transformers import AutoModel

    with torch.device("meta"):
        kind = type(AutoModel.from_config(hf).rotary_emb)
    with torch.device("cpu"):
        return kind(hf)
