"""A language model of Megatron Core's layers, in the shape of a Hugging Face model: an embedding, layers, a norm and a
head, which whet runs, cuts into pipeline stages and saves like any other. A vision tower stays transformers', on each
tensor-parallel rank."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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

from whet.models.attention.forest import AnyLayout, decoder_of
from whet.parallel.megatron.experts import mixture
from whet.parallel.megatron.layers import Norm, build_layer
from whet.parallel.parameters import persistent_buffers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Embedding(VocabParallelEmbedding):
    """Embeds tokens, whose vocabulary is split over the tensor-parallel ranks."""

    def __init__(self, hf: "PretrainedConfig", config: TransformerConfig, group: Any) -> None:
        sizes = hf.vocab_size, hf.hidden_size
        super().__init__(*sizes, init_method=_leave, config=config, tp_group=group)
        padding = hf.pad_token_id
        self.padding = None if padding is None else padding % hf.vocab_size  # -1 is the last one
        self.splits_tokens = config.sequence_parallel

    def forward(self, input_ids: Tensor) -> Tensor:
        """[1, N] -> [1, n, H]; with sequence parallelism n is this rank's part of N."""
        hidden: Tensor = super().forward(input_ids)
        if self.padding is not None:  # is not trained as an input, as in transformers
            hidden = torch.where((input_ids == self.padding)[..., None], hidden.detach(), hidden)
        if self.splits_tokens:
            hidden = scatter_to_sequence_parallel_region(hidden[0], group=self.tp_group)[None]
        return hidden


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
        self.embed_tokens = Embedding(hf, config, groups.tp)
        self.layers = nn.ModuleList(
            build_layer(config, number, groups, None if block is None else mixture(hf, block))
            for number, block in enumerate(blocks, 1)
        )
        self.norm = Norm(config, hf.hidden_size, config.layernorm_epsilon)
        # of rotary embeddings
        self.frequencies: Tensor
        self.axes: Tensor  # of positions with three numbers (M-RoPE): the one that each frequency multiplies
        self.register_buffer("frequencies", torch.empty(config.kv_channels // 2), persistent=False)
        self.register_buffer("axes", torch.empty(config.kv_channels // 2, dtype=torch.int64), persistent=False)
        self.checkpointing = False

    def set_rotary(self, rotary: nn.Module) -> None:
        """Take frequencies and axes from transformers' rotary embedding, which is on the CPU."""
        given: Any = rotary
        self.frequencies.copy_(given.inv_freq)
        self.axes.zero_()
        if hasattr(rotary, "mrope_section"):
            unit = torch.eye(3)[:, :, None]  # three rows, each with a position of 1 along one axis
            sines = given(torch.zeros(()), unit)[1][:, 0, : len(self.axes)]
            self.axes.copy_(sines.abs().argmax(0))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor,
        whet_forest: AnyLayout,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Sequence[Tensor] = (),
        **_: object,
    ) -> SimpleNamespace:
        """See ``forest_hidden`` and ``Embedded.arguments``. Hidden states of one stage are [1, n, H]; with sequence
        parallelism n is this rank's part, but for the last stage, which returns all."""
        hidden = (self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds).transpose(0, 1)
        positions = position_ids.flatten(0, -2).float()  # [1, N], or [3, N]
        angles = (positions[self.axes] if len(positions) > 1 else positions).T * self.frequencies.to(hidden.device)
        rotary = torch.cat([angles, angles], -1)[:, None, None]
        recomputes = self.checkpointing and self.training
        run = partial(checkpoint, _run, use_reentrant=False) if recomputes else _run
        for number, layer in enumerate(self.layers):
            hidden = run(layer, hidden, whet_forest, rotary)
            if number < len(deepstack_visual_embeds):
                assert visual_pos_masks is not None
                places, features = visual_pos_masks.T[..., None], deepstack_visual_embeds[number].to(hidden.dtype)
                hidden = hidden + torch.zeros_like(hidden).masked_scatter(places, features)
        hidden = self.norm(hidden)
        if self.settings.sequence_parallel and isinstance(self.norm, Norm):
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        return SimpleNamespace(last_hidden_state=hidden.transpose(0, 1))


class MegatronModel(nn.Module):
    """A decoder with a head, and the vision tower of a model that reads images. The head is never called: whet computes
    log-probs from its weight in tiles."""

    def __init__(
        self,
        whole: "PreTrainedModel",
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        blocks: Sequence[nn.Module | None],
    ) -> None:
        """``whole``: the Hugging Face model, whose vision tower is moved into this one. ``blocks``: each layer's
        experts and router there; None for a dense layer."""
        super().__init__()
        plain: Any = whole
        theirs = decoder_of(whole)
        hf: Any = theirs.config
        self.config = whole.config
        self.tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
        self.inside = next(name for name, module in whole.named_modules() if module is theirs)
        """The decoder's name: ``model``, or next to a vision tower for instance ``model.language_model``."""
        self.model = plain.model
        self.set_submodule(self.inside, MegatronDecoder(hf, config, groups, blocks))
        rows = hf.vocab_size // config.tensor_model_parallel_size
        self.lm_head = nn.Linear(hf.hidden_size, rows, bias=False, dtype=config.params_dtype)
        self.tie()
        self.stored: Callable[[str, Tensor], dict[str, Tensor]] = lambda name, tensor: {name: tensor}

    @property
    def base_model(self) -> nn.Module:
        """The model without its head, as transformers calls it."""
        return self.model

    def tie(self) -> None:
        """Give the head the embeddings' matrix, if the model ties them and has both here."""
        if self.tied and self.lm_head.weight is not None:
            self.lm_head.weight = self.get_input_embeddings().weight

    def get_decoder(self) -> MegatronDecoder:
        decoder = self.get_submodule(self.inside)
        assert isinstance(decoder, MegatronDecoder)
        return decoder

    def get_input_embeddings(self) -> Any:
        return self.get_decoder().embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def state_dict(self, *_: object, **__: object) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the weights under the names of the Hugging Face model, a tied head and the biases of routers included,
        as they are published."""
        named = chain(self.named_parameters(remove_duplicate=False), persistent_buffers(self))
        return {other: part for name, p in named for other, part in self.stored(name, p.detach()).items()}

    def gradient_checkpointing_enable(self, _: object) -> None:
        """Compute each layer again in the backward pass."""
        self.get_decoder().checkpointing = True


def _run(layer: nn.Module, hidden: Tensor, layout: AnyLayout, rotary: Tensor) -> Tensor:
    output = layer(hidden_states=hidden, attention_mask=layout, rotary_pos_emb=rotary)
    return output[0] if isinstance(output, tuple) else output


def _leave(_: Tensor) -> None:
    """Initialize nothing: every parameter is copied from the model's files."""
