"""The layers of a decoder, built by Megatron Core with parts of whet: norms, and attention over a forest of segments,
of heads or of latents (multi-head latent attention; DeepSeek-V2, arXiv 2405.04434).

Latent attention is Megatron Core's layer with four parts of whet: rotary angles of tokens in a forest, whose positions
are given; attention over the forest; norms of the latents; and projections to the latents that are whole on each
tensor-parallel rank, as Transformer Engine's are. Each rank applies them to its own tokens, so sequence parallelism is
needed. Megatron Core's own projection without Transformer Engine is cut, and then a rank gets the gradient of the
shared key's rotary part from its own heads only.
"""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn import functional as F

from whet.models.attention.forest import AnyLayout, forest_attention


class Norm(nn.Module):
    """RMSNorm in float32, rounded before the product with the weight, as in transformers. It may be spread over a
    sequence-parallel region."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)), eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class ForestAttention(nn.Module):
    """Megatron Core's ``core_attention``, by whet's attention over a forest. The layout is given as the mask."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None, **_: object) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: AnyLayout, **_: object) -> Tensor:
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


class LatentAttention(MLASelfAttention):
    """Megatron Core's layer, which would make the angles itself, for positions 0 to the number of tokens."""

    rotary_pos_emb: "GivenAngles"

    def __init__(self, config: MLATransformerConfig, *args: object, **named: object) -> None:
        super().__init__(config, *args, **named)
        del self.rotary_pos_emb
        self.rotary_pos_emb = GivenAngles(config.mscale)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Whole(config, config.q_lora_rank)
        self.linear_kv_down_proj = Whole(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)

    def forward(self, *args: object, rotary_pos_emb: Tensor, **named: object) -> tuple[Tensor, Tensor | None]:
        """rotary_pos_emb: [n, 1, 1, size]"""
        self.rotary_pos_emb.angles = rotary_pos_emb
        output: tuple[Tensor, Tensor | None] = super().forward(*args, **named)
        return output


class GivenAngles:
    """Angles of rotary embeddings, for the forward pass of one layer; ``scale`` multiplies their sines and cosines."""

    angles: Tensor

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get_rotary_seq_len(self, *_: object) -> int:
        return 0  # not used

    def __call__(self, _: int, packed_seq: bool) -> tuple[Tensor, float]:
        return self.angles, self.scale


class Whole(nn.Module):
    """A linear layer that no rank cuts."""

    def __init__(self, config: MLATransformerConfig, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return F.linear(hidden, self.weight), None


class LatentNorm(nn.Module):
    """A norm with the epsilon that transformers uses for latents, whatever the config says."""

    def __init__(self, config: MLATransformerConfig, hidden_size: int, **_: object) -> None:
        super().__init__()
        self.latent = Norm(config, hidden_size, 1e-6)

    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.latent(hidden)
        return normed


def latent_attention(groups: ProcessGroupCollection) -> ModuleSpec:
    """Return the specification of a layer's attention with latents."""
    parts = LocalSpecProvider()
    cut = parts.column_parallel_linear()
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ModuleSpec(cut, {"tp_group": groups.tp}),  # which Megatron Core leaves out
        linear_q_down_proj=cut,
        linear_q_up_proj=cut,
        linear_kv_down_proj=cut,
        linear_kv_up_proj=cut,
        core_attention=ForestAttention,
        linear_proj=parts.row_parallel_linear(),
        q_layernorm=LatentNorm,
        kv_layernorm=LatentNorm,
    )
    return ModuleSpec(LatentAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)


def build_layer(
    config: TransformerConfig, number: int, groups: ProcessGroupCollection, experts: ModuleSpec | None
) -> TransformerLayer:
    """Return layer ``number``, from 1; ``experts``: instead of a dense feed-forward."""
    latent = isinstance(config, MLATransformerConfig)
    submodules = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=latent_attention(groups) if latent else head_attention(config),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=experts or ModuleSpec(MLP, submodules=feed_forward()),
        mlp_bda=get_bias_dropout_add,
    )
    return TransformerLayer(config, submodules, number, pg_collection=groups)


def feed_forward() -> MLPSubmodules:
    """Return the parts of a dense feed-forward."""
    parts = LocalSpecProvider()
    return MLPSubmodules(linear_fc1=parts.column_parallel_linear(), linear_fc2=parts.row_parallel_linear())
