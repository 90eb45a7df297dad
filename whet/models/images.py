"""Images in a model: the features of its vision tower, which take the places of embeddings, and the positions of the
tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.core.images import images_of
from whet.models.attention.forest import decoder_of, unwrapped
from whet.models.attention.layout import Ahead, ahead_in_runs
from whet.models.device import placed
from whet.models.image_processor import ImageProcessor, feature_rows, grid_positions
from whet.models.shards import Tokens
from whet.models.stages import Stage, StageInput

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(slots=True, frozen=True)
class Embedded:
    """The inputs of a decoder for N tokens with images, of which n are this rank's between matrices."""

    total: int  # N
    embeddings: Tensor | None = None  # [n, H], with the features of images; None: not of a pipeline's first stage
    of_image: Tensor | None = None  # [n] bool: the places of features
    deep: tuple[Tensor, ...] = ()  # [features, H] each: what the first layers add to their results at these places
    positions: Tensor | None = None  # [3, N]; None: the tokens are counted
    ahead: Ahead | None = None  # later tokens that tokens of images see, on the CPU; None: none
    of_layers: Tensor | None = None  # [n, layers, D], what the layers of some models also embed (Gemma 4)

    def arguments(self, counted: Tensor, stage: Stage | None = None) -> dict[str, object]:
        """Return the arguments of a decoder of transformers. ``counted``, [1, n]: the tokens' positions if they are
        counted; n - N tokens of padding are at the end. The features for several layers (DeepStack, arXiv 2406.04334)
        are arguments of decoders that take them; a decoder of one ``stage`` gets none for later layers."""
        end = (0, counted.shape[1] - self.total)
        arguments: dict[str, Any] = {"position_ids": counted}
        if self.positions is not None:
            arguments["position_ids"] = F.pad(placed(self.positions, counted.device), end)[:, None]
        if self.embeddings is not None:
            arguments |= {"input_ids": None, "inputs_embeds": F.pad(self.embeddings, (0, 0, *end))[None]}
        if self.of_layers is not None:
            arguments["per_layer_inputs"] = F.pad(self.of_layers, (0, 0, 0, 0, *end))[None]
        if self.deep:
            assert self.of_image is not None
            arguments |= {
                "visual_pos_masks": F.pad(self.of_image, end)[None],
                "deepstack_visual_embeds": list(self.deep[: None if stage is None else stage.layers.stop]),
            }
        return arguments


def embedded(
    model: nn.Module,
    batch: Batch,
    images: ImageProcessor,
    layout: Tokens | None = None,
    stage_input: StageInput | None = None,
) -> Embedded:
    """Return the inputs of the decoder for a batch, padded as its ``layout`` over ranks asks for. A rank computes the
    images that have places among its own tokens; a stage of a pipeline that gets hidden states computes none. Raises
    ``DataError`` for a part of an image."""
    assert batch.image is not None
    layout = layout or Tokens()
    rows = feature_rows(batch.image, batch.images, images)
    positions, start = None, batch.segment_start.tolist()
    if images.with_grids:
        grids = [images.grid(url) for url in batch.images]
        positions = grid_positions(batch.position, start, batch.segment_parent.tolist(), batch.image, rows, grids)
    ahead = None if images.looks_ahead is None else _ahead(ahead_in_runs(batch.image >= 0, start), images)
    total = layout.padded(len(batch))
    end = (0, total - len(batch))
    here = torch.cat([torch.arange(run.start, run.stop) for run in layout.runs(total)])
    tokens, image, rows = (
        padded[here]
        for padded in (F.pad(batch.tokens.long(), end), F.pad(batch.image, end, value=-1), F.pad(rows, end))
    )
    positions = positions if positions is None else F.pad(positions, end)[:, here]
    if stage_input is not None and stage_input.hidden is not None:
        of_image, device = image[layout.between_matrices(len(here))] >= 0, stage_input.hidden.device
        deep = stage_input.deep(placed(of_image.nonzero().squeeze(1), device))
        return Embedded(len(here), None, placed(of_image, device), deep, positions, ahead)
    return _embed(model, tokens, image, rows, batch.images, images, positions, ahead, layout)


def embedded_parts(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    parts: Sequence[range],
    urls: Sequence[Sequence[str]],
    images: ImageProcessor,
) -> tuple[Embedded, list[int]]:
    """Return the inputs of the decoder for a part of each prompt, and how much the position of the token after each
    prompt differs from the prompt's length. ``urls``: the images of each prompt. Raises ``DataError`` for a prompt with
    a part of an image."""
    different, columns = images_of(prompts, urls)
    grids = [images.grid(url) for url in different] if images.with_grids else []
    image, rows, positions, shifts = list[Tensor](), list[Tensor](), list[Tensor](), list[int]()
    aheads: list[Tensor] = []
    for column, part in zip(torch.from_numpy(columns).split([len(prompt) for prompt in prompts]), parts, strict=True):
        row, here = feature_rows(column, different, images), slice(part.start, part.stop)
        place = torch.arange(len(column))
        whole = grid_positions(place, [0], [-1], column, row, grids) if images.with_grids else place[None]
        image.append(column[here])
        rows.append(row[here])
        positions.append(whole[:, here])
        aheads.append(ahead_in_runs(column >= 0, [0])[here])
        shifts.append(int(whole.max()) + 1 - len(column))
    tokens = torch.tensor([prompt[place] for prompt, part in zip(prompts, parts, strict=True) for place in part])
    of_three = torch.cat(positions, dim=1) if images.with_grids else None
    ahead = None if images.looks_ahead is None else _ahead(torch.cat(aheads), images)
    return _embed(model, tokens, torch.cat(image), torch.cat(rows), different, images, of_three, ahead), shifts


def _ahead(runs: Tensor, images: ImageProcessor) -> Ahead:
    return Ahead(runs, images.looks_ahead == "everywhere")


def _embed(
    model: nn.Module,
    tokens: Tensor,
    image: Tensor,
    rows: Tensor,
    urls: Sequence[str],
    images: ImageProcessor,
    positions: Tensor | None,
    ahead: Ahead | None,
    layout: Tokens | None = None,
) -> Embedded:
    """Return the inputs of the decoder for tokens. Images are computed one by one, so that the features of an image
    don't depend on others; an image without a place is not computed."""
    embedding = unwrapped(model).get_input_embeddings()
    device = embedding.weight.device
    result: Tensor = embedding(placed(tokens.clamp(min=0)[None], device))[0]  # of this rank's tokens
    total, part = len(tokens), (layout or Tokens()).between_matrices(len(tokens))
    tokens, image, rows = tokens[part], image[part], rows[part]
    of_image = image >= 0
    number = of_image.cumsum(0) - 1  # of each token of an image, among them
    deep: list[Tensor] = []
    for index in image[of_image].unique().tolist():
        features, *deeper = (part.to(result.dtype) for part in image_features(model, images.inputs(urls[index])))
        places = (image == index).nonzero().squeeze(1)
        picked = placed(rows[places], device)
        result = result.index_copy(0, placed(places, device), features.index_select(0, picked))
        deep = deep or [features.new_zeros(int(of_image.sum()), features.shape[1]) for _ in deeper]
        into = placed(number[places], device)
        deep = [
            whole.index_copy(0, into, part.index_select(0, picked)) for whole, part in zip(deep, deeper, strict=True)
        ]
    at = None if positions is None else placed(positions, device)
    return Embedded(total, result, placed(of_image, device), tuple(deep), at, ahead, _of_layers(model, tokens))


def _of_layers(model: nn.Module, tokens: Tensor) -> Tensor | None:
    """Return the embeddings of tokens for each layer, [N, layers, D], if the model has any (Gemma 4); tokens of images
    have the embeddings of padding."""
    padding = padding_at_images(unwrapped(model).config)
    if padding is None:
        return None
    ids = tokens.where(tokens >= 0, padding)
    decoder: Any = decoder_of(model)
    table = decoder.embed_tokens_per_layer.weight
    inputs: Tensor = decoder.get_per_layer_inputs(placed(ids, table.device)[None], None)
    return inputs[0]


def padding_at_images(config: "PretrainedConfig") -> int | None:
    """Return the padding token whose embeddings for each layer the tokens of images have; ``None``: a model without
    such embeddings. Another padding token would make it another model."""
    text: Any = config.get_text_config()
    return text.pad_token_id if getattr(text, "hidden_size_per_layer_input", 0) else None


def image_features(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the features that the vision tower and the layers after it make of an image, [features, H], and those for
    the first layers of the decoder, if it takes them."""
    whole: Any = unwrapped(model)
    weight = whole.get_input_embeddings().weight
    encoded = whole.base_model.get_image_features(**of_dtype(inputs, weight))
    features = encoded.pooler_output
    if features is None:  # before the projection (Llama 4)
        features = whole.multi_modal_projector(_joined(encoded.last_hidden_state))
    return [_joined(part) for part in (features, *getattr(encoded, "deepstack_features", ()))]


def of_dtype(inputs: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a vision tower on the device of its model's weights, pixels in their dtype: some processors
    round them (Llama 4)."""
    return {
        name: placed(tensor, weight.device).to(weight.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def freeze_tower(model: nn.Module) -> None:
    """Freeze the vision tower; the layers between tower and decoder are still trained."""
    whole = unwrapped(model)
    tower = whole.get_encoder(modality="image")
    if tower is whole or any(parameter is whole.get_input_embeddings().weight for parameter in tower.parameters()):
        raise WhetError(
            f"model.vision = frozen: transformers does not name the vision tower of {type(whole).__name__}; set "
            "model.vision=trained, and freeze parameters by optimizer.groups"
        )
    tower.requires_grad_(False)


def zero_of_tower(model: nn.Module) -> Tensor:
    """Return a zero, [], through which gradients of zero reach all trained parameters outside of decoder and head. So
    every parameter has a gradient after every micro-batch, with or without images, as ranks need that sum gradients."""
    trained = (parameter for parameter in of_tower(model).values() if parameter.requires_grad)
    return sum((0 * parameter.sum() for parameter in trained), torch.zeros(()))


def of_tower(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters outside of decoder and head, by name: of the vision tower, and the layers after it."""
    head = unwrapped(model).get_output_embeddings()
    inside = {id(p) for module in (decoder_of(model), head) for p in module.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in inside}


def outside_decoder(model: nn.Module, decoder: nn.Module) -> list[str]:
    """Return the names of the layers, linear or not, of the vision tower and its projection."""
    inside = {id(module) for module in decoder.modules()}
    head = unwrapped(model).get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and id(module) not in inside and module is not head
    ]
