"""A language model of Megatron Core's layers, in the shape of a Hugging Face model: an embedding, layers, a norm and a
head, which whet runs, cuts into pipeline stages and saves like any other."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from whet.models.attention.forest import AnyLayout
from whet.parallel.megatron.experts import mixture
from whet.parallel.megatron.layers import Norm, build_layer
from whet.parallel.parameters import persistent_buffers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class MegatronDecoder(nn.Module):
    """Maps tokens to final hidden states."""

    def __init__(
        self,
        hf: "PretrainedConfig",
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        blocks: Sequence[nn.Module | None],
    ) -> None:
        super().__init__()
        self.config, self.settings, self.groups = hf, config, groups
        self.embed_tokens = VocabParallelEmbedding(
            hf.vocab_size,
            hf.hidden_size,
            init_method=_leave,
            config=config,
            tp_group=groups.tp,
        )
        self.layers = nn.ModuleList(
            build_layer(config, number, groups, None if block is None else mixture(hf, block))
            for number, block in enumerate(blocks, 1)
        )
        self.norm = Norm(config, hf.hidden_size, config.layernorm_epsilon)
        # of rotary embeddings
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(config.kv_channels // 2), persistent=False)
        self.checkpointing = False

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor,
        whet_forest: AnyLayout,
        **_: object,
    ) -> SimpleNamespace:
        """See ``forest_hidden``. Hidden states of one stage are [1, n, H]; with sequence parallelism n is this rank's
        part, but for the last stage, which returns all."""
        if inputs_embeds is not None:
            hidden = inputs_embeds.transpose(0, 1)
        else:
            hidden = self.embed_tokens(input_ids)
            if self.config.pad_token_id is not None:  # is not trained as an input, as in transformers
                hidden = torch.where((input_ids == self.config.pad_token_id)[..., None], hidden.detach(), hidden)
            hidden = hidden.transpose(0, 1).contiguous()
            if self.settings.sequence_parallel:
                hidden = scatter_to_sequence_parallel_region(hidden, group=self.groups.tp)
        angles = position_ids[0].float()[:, None] * self.frequencies.to(hidden.device)
        rotary = torch.cat([angles, angles], -1)[:, None, None]
        recomputes = self.checkpointing and self.training
        run = partial(checkpoint, _run, use_reentrant=False) if recomputes else _run
        for layer in self.layers:
            hidden = run(layer, hidden, whet_forest, rotary)
        hidden = self.norm(hidden)
        if self.settings.sequence_parallel and isinstance(self.norm, Norm):
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        return SimpleNamespace(last_hidden_state=hidden.transpose(0, 1))


class MegatronModel(nn.Module):
    """A decoder with a head. The head is never called: whet computes log-probs from its weight in tiles. ``blocks`` are
    each layer's experts and router in the Hugging Face model; None for a dense layer."""

    def __init__(
        self,
        hf: "PretrainedConfig",
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        blocks: Sequence[nn.Module | None],
    ) -> None:
        super().__init__()
        self.config = hf
        self.model = MegatronDecoder(hf, config, groups, blocks)
        rows = hf.vocab_size // config.tensor_model_parallel_size
        self.lm_head = nn.Linear(hf.hidden_size, rows, bias=False, dtype=config.params_dtype)
        if hf.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.stored: Callable[[str, Tensor], dict[str, Tensor]] = lambda name, tensor: {name: tensor}

    def get_decoder(self) -> MegatronDecoder:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def state_dict(self, *_: object, **__: object) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the weights under the names of the Hugging Face model, a tied head and the biases of routers included,
        as they are published."""
        named = chain(self.named_parameters(remove_duplicate=False), persistent_buffers(self))
        return {other: part for name, p in named for other, part in self.stored(name, p.detach()).items()}

    def gradient_checkpointing_enable(self, _: object) -> None:
        """Compute each layer again in the backward pass."""
        self.model.checkpointing = True


def _run(layer: nn.Module, hidden: Tensor, layout: AnyLayout, rotary: Tensor) -> Tensor:
    output = layer(hidden_states=hidden, attention_mask=layout, rotary_pos_emb=rotary)
    return output[0] if isinstance(output, tuple) else output


def _leave(_: Tensor) -> None:
    """Initialize nothing: every parameter is copied from the model's files."""
