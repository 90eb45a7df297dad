"""The layers of a decoder, built by Megatron Core with parts of whet."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from whet.parallel.megatron.attention import head_attention
from whet.parallel.megatron.latent import latent_attention
from whet.parallel.megatron.norm import Norm


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
