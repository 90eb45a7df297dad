"""Attention of Megatron Core's layers: over a forest of segments, by whet."""

from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from whet.models.attention.forest import AnyLayout, forest_attention
from whet.parallel.megatron.norm import Norm


class ForestAttention(nn.Module):
    """Megatron Core's ``core_attention``, by whet's attention over a forest. The layout is given as the mask."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: AnyLayout, **_: Any) -> Tensor:
        """[n, 1, heads, size] -> [n, 1, heads * size]"""
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out, _none = forest_attention(self, query, key, value, None, self.scale, whet_forest=attention_mask)
        return out.transpose(0, 1).flatten(2)


def head_attention(config: TransformerConfig) -> ModuleSpec:
    """Return the specification of a layer's attention, whose queries, keys and values are one joined projection."""
    parts = LocalSpecProvider()
    norm = Norm if config.qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=parts.column_parallel_linear(),
        core_attention=ForestAttention,
        linear_proj=parts.row_parallel_linear(),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)
