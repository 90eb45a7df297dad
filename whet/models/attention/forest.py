"""Attention over a forest of segments, through transformers' ``AttentionInterface``, without a fork of modelling code.

Inputs are the packed queries, keys and values of one layer, [1, heads, N, size], and a ``ForestLayout`` that is built
once per batch. A segment's queries see the tokens of its ancestors and, causally, the tokens of the segment. Segments
of similar size are padded into blocks, so that 64 short answers cost one product instead of 64.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.models.attention.dense import (
    AttentionSettings,
    dense_attention,
    fused_attention,
    score_dtype,
    uses_onednn,
)
from whet.models.attention.flex import FlexLayout
from whet.models.attention.layout import Ahead, ForestLayout, padded_segments
from whet.models.attention.states import Inputs, state_forest_hidden, supports_prefix_fork
from whet.models.attention.varlen import VarlenLayout
from whet.models.config import AttentionKernel
from whet.models.device import placed
from whet.models.shards import Tokens
from whet.models.stages import StageInput, stage_decoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from whet.models.images import Embedded

AnyLayout: TypeAlias = "ForestLayout | FlexLayout | VarlenLayout"

NAME = "whet_forest"
_DENSE_KEYS = 512  # in longer rows, the fused kernel saves more by skipping future keys


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    whet_forest: "AnyLayout | None" = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute one layer, [1, heads, N, size] -> [1, N, heads, size]; key and value may have fewer heads."""
    if whet_forest is None:
        raise WhetError(
            "this model has forest attention selected but was called without a layout; call it through forest_hidden, "
            "or select another attention with model.set_attn_implementation('sdpa')"
        )
    layout = whet_forest
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    settings = AttentionSettings.of_layer(query, scaling, sliding_window, softcap, s_aux)
    if not isinstance(layout, ForestLayout):
        return layout.attend(query, key, value, settings), None
    keys, values = _rows(key), _rows(value)
    if layout.tokens.spread:  # both at once
        keys, values = layout.tokens.gather(torch.cat([keys, values], 1)).split([keys.shape[1], values.shape[1]], 1)
    queries, keys, values = layout.query(_rows(query)), layout.key(keys), layout.key(values)

    results, q, k = [], 0, 0
    for index, block in enumerate(layout.blocks):
        q_end, k_end = q + block.rows * block.queries, k + block.rows * block.keys
        results.append(
            _attend(
                queries[q:q_end].view(block.rows, block.queries, query.shape[1], -1),
                keys[k:k_end].view(block.rows, block.keys, key.shape[1], -1),
                values[k:k_end].view(block.rows, block.keys, value.shape[1], -1),
                layout, index, settings, dropout,
            ).reshape(q_end - q, -1)
        )  # fmt: skip
        q, k = q_end, k_end
    packed = layout.result(torch.cat(results) if len(results) > 1 else results[0])
    return packed.view(1, query.shape[2], query.shape[1], -1), None


def _rows(x: Tensor) -> Tensor:
    """Reshape [1, heads, N, size] -> [N, heads * size]"""
    return x[0].transpose(0, 1).reshape(x.shape[2], -1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: ForestLayout,
    index: int,
    settings: AttentionSettings,
    dropout: float,
) -> Tensor:
    """Compute the attention of one block, [C, L, heads, size] -> the same."""
    special = settings.softcap is not None or settings.sinks is not None
    if special and dropout > 0.0:
        raise WhetError(
            "attention dropout together with soft caps or sinks is not supported; set attention_dropout to 0"
        )
    short = key.shape[1] <= _DENSE_KEYS and uses_onednn(query)
    if special or (short and dropout == 0.0):
        mask = layout.mask(index, settings.window, score_dtype(query.dtype), always=True)
        assert mask is not None
        return dense_attention(query, key, value, mask, settings)
    mask = layout.mask(index, settings.window, query.dtype)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return fused_attention(query, key, value, mask, settings.scale, dropout).transpose(1, 2)


def register() -> None:
    """Register ``whet_forest`` with transformers. May be called any number of times. There is no mask function, so that
    transformers builds no masks and does not inspect positions, for which it would wait for a GPU."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(forest_attention))


# These claim to support the attention interface, but use their own masks (doge, phimoe) or don't pass arguments to it.
_OWN_MASKS = {"doge", "moshi", "nemotron", "phimoe"}


def supports_forest(hf_config: "PretrainedConfig") -> bool:
    """Return whether all layers use transformers' attention interface. Recurrent, convolutional and linear attention
    layers carry a state along the row, so their batches must be laid out with unshared prompts."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    architecture = architecture or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(hf_config), None)
    if architecture is None or isinstance(architecture, tuple) or hf_config.is_encoder_decoder:
        return False
    kinds = set(getattr(hf_config.get_text_config(), "layer_types", None) or [])
    return (
        architecture._supports_attention_backend
        and not architecture._is_stateful
        and hf_config.model_type not in _OWN_MASKS
        and kinds <= {"full_attention", "sliding_attention"}
    )


def use_forest_attention(model: "PreTrainedModel") -> None:
    """Select forest attention. Raises ``WhetError`` for an architecture that doesn't support it."""
    if not supports_forest(model.config):
        raise WhetError(
            f"{type(model).__name__} has layers that are not plain attention; "
            "lay its batches out with share_prompts=False"
        )
    register()
    select_in_decoder(model, NAME)


def select_in_decoder(model: "PreTrainedModel", attention: str) -> None:
    """Select an attention implementation in the decoder; a vision tower keeps its own."""
    text = model.config.get_text_config()
    part = next((name for name in model.config.sub_configs if getattr(model.config, name, None) is text), None)
    model.set_attn_implementation(attention if part is None else {part: attention})


def unwrapped(model: nn.Module) -> "PreTrainedModel":
    """Return the Hugging Face model inside a PEFT wrapper, or the model itself."""
    get_base_model: Any = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def decoder_of(model: nn.Module) -> "PreTrainedModel":
    """Return the part of a causal language model (or its PEFT wrapper) that maps tokens to final hidden states."""
    from transformers import PreTrainedModel

    whole = unwrapped(model)
    decoder = whole.get_decoder()  # transformers guesses by the names of submodules
    if decoder is not whole and hasattr(decoder, "lm_head"):  # a whole language model inside (Llama 4)
        return decoder_of(decoder)
    guessed = isinstance(whole, PreTrainedModel) and not isinstance(decoder, PreTrainedModel)
    return whole.model if guessed or decoder is whole else decoder


def layout_of(
    batch: Batch, device: torch.device, tokens: Tokens, attention: AttentionKernel, ahead: Ahead | None = None
) -> AnyLayout:
    """Return the layout of a batch for an implementation; where tokens see later ones (``ahead``), for ``blocks``, the
    only one that can do it."""
    if attention == "blocks" or ahead is not None:
        return ForestLayout.of(batch, device, tokens, ahead)
    starts, parents, size = padded_segments(batch, tokens)
    if attention == "varlen":
        return VarlenLayout.of(starts, parents, size, device, tokens)
    return FlexLayout.of(starts, parents, size, device) or ForestLayout.of(batch, device, tokens)


def forest_hidden(
    model: nn.Module,
    batch: Batch,
    tokens: Tokens | None = None,
    stage_input: StageInput | None = None,
    *,
    attention: AttentionKernel = "blocks",
    lockstep: bool = False,
    embedded: "Embedded | None" = None,
) -> Tensor:
    """Return the final hidden states of every token of a batch, [N, H], as if each sequence had been run alone.

    ``tokens`` is the batch's layout over ranks, all of which get all hidden states. With ``stage_input`` only that
    stage of a pipeline is run; unless it is the last one, what it passes on for this rank's part of the tokens is
    returned, including padding, [1 + stage.leaving, n, H]. ``attention`` selects the implementation. A model without
    forest attention runs segments as rows (see ``states``) and can't be distributed; with ``lockstep``, which means
    that other ranks run the layers at the same time, it runs in one call, without shared segments. Layers get the
    batch's experts; see ``routing``. ``embedded`` replaces the embeddings of the tokens; see ``whet.models.images``.
    """
    if embedded is None and batch.images:
        raise WhetError("the batch has images, and the model reads none; set model.vision to frozen or trained")
    decoder = decoder_of(model) if stage_input is None else stage_decoder(decoder_of(model), stage_input.stage)
    entering = None if stage_input is None else stage_input.hidden
    device = decoder.get_input_embeddings().weight.device if entering is None else entering.device
    tokens = tokens or Tokens()
    if decoder.config._attn_implementation == NAME:
        padding = (0, tokens.padded(len(batch)) - len(batch))
        here = torch.cat([torch.arange(run.start, run.stop) for run in tokens.runs(len(batch) + padding[1])])
        inputs: dict[str, Any] = {
            "input_ids": placed(F.pad(batch.tokens, padding)[here][None].long(), device) if entering is None else None,
            "inputs_embeds": entering,
            "position_ids": placed(F.pad(batch.position, padding)[here][None], device),
        }
        if embedded is not None:
            inputs |= embedded.arguments(inputs["position_ids"], None if stage_input is None else stage_input.stage)
        if batch.experts is not None:
            inputs["whet_experts"] = placed(F.pad(batch.experts, (0, 0, 0, 0, *padding), value=-1)[here], device)
        layout = layout_of(batch, device, tokens, attention, None if embedded is None else embedded.ahead)
        packed: Tensor = decoder(**inputs, use_cache=False, whet_forest=layout).last_hidden_state
        if stage_input is not None and not stage_input.stage.last:
            of_image, deep = (None, ()) if embedded is None else (embedded.of_image, embedded.deep)
            return stage_input.stage.passed_on(packed, of_image, deep)
        hidden = tokens.gather(packed[0])
        return hidden[: len(batch)]
    if embedded is not None and (embedded.deep or embedded.ahead is not None or embedded.of_layers is not None):
        raise WhetError(
            f"{type(decoder).__name__} has layers that are not plain attention; it can't read images that are more "
            "than embeddings"
        )
    parents = batch.segment_parent.tolist()
    stateless = decoder.training and decoder.is_gradient_checkpointing  # layers then get no cache
    if max(parents) >= 0 and (lockstep or stateless or not supports_prefix_fork(decoder.config)):
        raise WhetError("this model needs batches without shared prompts; lay them out with share_prompts=False")
    inputs_of_rows = Inputs(placed(batch.tokens.long(), device))
    if embedded is not None:
        inputs_of_rows = Inputs(inputs_of_rows.tokens, embedded.embeddings, embedded.positions)
    return state_forest_hidden(decoder, inputs_of_rows, batch.segment_start.tolist(), parents, whole=lockstep)
