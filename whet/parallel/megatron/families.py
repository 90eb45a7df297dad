"""The families of models that Megatron Core's layers compute here, and the names of their parameters in Megatron Core
and in Hugging Face's files. Imports no Megatron Core: recipes are checked with this."""

from typing import TYPE_CHECKING, Any

from whet.fetch.megatron_layout import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "self_attention.linear_q_proj": ("self_attn.q_proj",),
    "self_attention.linear_q_down_proj": ("self_attn.q_a_proj",),
    "self_attention.linear_q_up_proj": ("self_attn.q_b_proj",),
    "self_attention.linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attention.linear_kv_up_proj": ("self_attn.kv_b_proj",),
    "self_attention.q_layernorm.latent": ("self_attn.q_a_layernorm",),
    "self_attention.kv_layernorm.latent": ("self_attn.kv_a_layernorm",),
    "input_layernorm": ("input_layernorm",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "mlp.router.here": ("mlp.gate",),
    "mlp.experts.here": ("mlp.experts",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared_experts.down_proj",),
}
"""Modules of a layer in Megatron Core, and the Hugging Face modules whose weights each has, in one tensor."""

BY_OUTPUTS = (
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_up_proj",
    "mlp.linear_fc1",
    "mlp.shared_experts.linear_fc1",
)
"""Modules whose matrices tensor parallelism cuts by their outputs."""
BY_INPUTS = ("self_attention.linear_proj", "mlp.linear_fc2", "mlp.shared_experts.linear_fc2")
"""Modules whose matrices tensor parallelism cuts by their inputs."""
UNCUT = ("self_attention.linear_q_down_proj", "self_attention.linear_kv_down_proj")
"""Modules whose matrices are whole on each tensor-parallel rank, which applies them to its own tokens."""


READS_IMAGES = ("idefics3", "smolvlm", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""The ``model_type`` of models with a vision tower, which stays transformers'."""
_OF_QWEN_VL = ("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
"""The same of their language models, which in the other models are of a family above."""


def unsupported(hf: "PretrainedConfig") -> str:
    """Return why the model of a Hugging Face config can't be built; empty if it can."""
    text: Any = hf.get_text_config()
    if hf.model_type not in FAMILIES + READS_IMAGES:
        return f"model_type {hf.model_type} is not one of {', '.join(FAMILIES + READS_IMAGES)}"
    if text.model_type not in FAMILIES + _OF_QWEN_VL:
        return f"the model_type of its text, {text.model_type}, is not one of {', '.join(FAMILIES + _OF_QWEN_VL)}"
    return ", ".join(_unusual(text))


def has_joined_biases(text: "PretrainedConfig") -> bool:
    """Return whether projections of queries, keys and values have biases, as in Qwen2."""
    return text.model_type in ("qwen2", "qwen2_5_vl_text")


def _unusual(hf: Any) -> list[str]:
    """Return the settings of a language model that the layers don't have."""
    rope, latent = getattr(hf, "rope_parameters", None) or {}, hf.model_type == "deepseek_v3"
    checks = {
        "hidden_act": (hf.hidden_act, ("silu",)),
        "attention_dropout": (hf.attention_dropout, (0, 0.0)),
        "mlp_bias": (getattr(hf, "mlp_bias", False), (False,)),
        "sliding_window": (getattr(hf, "sliding_window", None), (None,)),
        "router_jitter_noise": (getattr(hf, "router_jitter_noise", 0), (0, 0.0)),
        "rope_type": (
            rope.get("rope_type", "default"),
            ("default", "yarn") if latent else ("default", "linear", "llama3"),
        ),
        "rope_interleave": (getattr(hf, "rope_interleave", True), (True,)),
    }
    if latent:  # each head has its own keys
        checks["num_key_value_heads"] = (hf.num_key_value_heads, (hf.num_attention_heads,))
    if not has_joined_biases(hf):
        checks["attention_bias"] = (getattr(hf, "attention_bias", False), (False,))
    return [f"{name} = {value}" for name, (value, allowed) in checks.items() if value not in allowed]
