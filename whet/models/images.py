"""Images in a model: the tokens and inputs that its processor makes of an image, and the features of its vision tower,
which take the places of embeddings."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.base.errors import DataError, WhetError
from whet.base.extras import extra
from whet.core.batch import Batch
from whet.core.images import images_of, placeholders
from whet.fetch.images import open_image
from whet.models.attention.forest import unwrapped
from whet.models.device import placed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # what is not for the vision tower


class ImageProcessor:
    """The image processor of a model, for the renderer, the engine and the learner of a process: their threads take
    turns. It keeps the tokens of images, but not the inputs, which are large."""

    def __init__(self, processor: Any, feature_id: int) -> None:
        """``feature_id``: the token in whose places the model puts features, ``image_token_id`` of its config."""
        self._processor = processor
        self._feature_id = feature_id
        self.mark: int = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        """The token that a chat template writes for an image."""
        self._lock = Lock()  # fast tokenizers can't be used by two threads at once
        self._tokens = lru_cache(maxsize=4096)(self._tokens_of)

    @classmethod
    def of(cls, folder: Path, config: "PretrainedConfig") -> "ImageProcessor":
        """Return the processor of the model in a folder. Raises ``WhetError`` if it has none that can be used."""
        with extra("images", "model.vision"):
            import PIL.Image  # noqa: F401
        from transformers import AutoProcessor

        feature_id = getattr(config, "image_token_id", None)
        try:
            processor: Any = AutoProcessor.from_pretrained(folder)
        except (OSError, ValueError, ImportError, TypeError) as error:
            text = str(error).strip().partition("\n")[0]
            raise WhetError(f"model.vision: the processor of images in {folder} can't be loaded: {text}") from error
        if feature_id is None or not hasattr(processor, "image_token"):
            raise WhetError(
                f"model.vision: the model in {folder} has no processor of images with an image_token; leave "
                "model.vision out to train its text part, if it has one"
            )
        return cls(processor, feature_id)

    def tokens(self, url: str) -> Sequence[int]:
        """Return the tokens that stand for an image, with the text that the processor writes around them."""
        return self._tokens(url)

    def _tokens_of(self, url: str) -> tuple[int, ...]:
        ids = self._process(url)["input_ids"][0].tolist()
        ours = iter(placeholders(url, ids.count(self._feature_id)))
        return tuple(next(ours) if id == self._feature_id else id for id in ids)

    def marked(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens as the model's own code and the tokenizer have them, the same for every image."""
        return [self._feature_id if token < 0 else token for token in tokens]

    def size(self, url: str) -> int:
        """Return the number of an image's features."""
        return sum(token < 0 for token in self.tokens(url))

    def inputs(self, url: str) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for an image."""
        return {name: tensor for name, tensor in self._process(url).items() if name not in _TEXT}

    def check(self, prompt: Sequence[int], urls: Sequence[str]) -> None:
        """Raise ``DataError`` for placeholders of other images, or of a part of an image."""
        different, column = images_of([prompt], [urls])
        _rows(torch.from_numpy(column), different, self)

    def _process(self, url: str) -> dict[str, Tensor]:
        image = open_image(url).convert("RGB")
        with self._lock:
            made = self._processor(
                text=self._processor.image_token, images=[image], add_special_tokens=False, return_tensors="pt"
            )
        return dict(made)


def embedded(model: nn.Module, batch: Batch, images: ImageProcessor) -> Tensor:
    """Return the embeddings of a batch's tokens, [N, H], with the features of its images in their places. Raises
    ``DataError`` for a part of an image."""
    assert batch.image is not None
    rows = _rows(batch.image, batch.images, images)
    return _embed(model, batch.tokens, batch.image, rows, batch.images, images)


def embedded_parts(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    parts: Sequence[range],
    urls: Sequence[Sequence[str]],
    images: ImageProcessor,
) -> Tensor:
    """Return the embeddings of a part of each prompt, [N, H], with the features of images in their places. ``urls``:
    the images of each prompt. Raises ``DataError`` for a prompt with a part of an image."""
    different, columns = images_of(prompts, urls)
    image, rows = list[Tensor](), list[Tensor]()
    for column, part in zip(torch.from_numpy(columns).split([len(prompt) for prompt in prompts]), parts, strict=True):
        image.append(column[part.start : part.stop])
        rows.append(_rows(column, different, images)[part.start : part.stop])
    tokens = torch.tensor([prompt[place] for prompt, part in zip(prompts, parts, strict=True) for place in part])
    return _embed(model, tokens, torch.cat(image), torch.cat(rows), different, images)


def _rows(image: Tensor, urls: Sequence[str], images: ImageProcessor) -> Tensor:
    """Return the number of each token among the features of its image, 0 for other tokens, [N]. ``image``, [N]: the
    index of each token's image, -1 for other tokens."""
    rows = torch.zeros_like(image)
    for index, url in enumerate(urls):
        places, size = (image == index).nonzero().squeeze(1), images.size(url)
        if len(places) % size:
            raise DataError(f"an image of {size} tokens has {len(places)} places among the tokens: it was cut")
        rows[places] = torch.arange(len(places)) % size
    return rows


def _embed(
    model: nn.Module, tokens: Tensor, image: Tensor, rows: Tensor, urls: Sequence[str], images: ImageProcessor
) -> Tensor:
    """Return the embeddings of tokens, [N, H], with the features of images in their places. Images are computed one by
    one, so that the features of an image don't depend on others; an image without a place is not computed."""
    embedding = unwrapped(model).get_input_embeddings()
    device = embedding.weight.device
    result: Tensor = embedding(placed(tokens.clamp(min=0), device))
    for index in image[image >= 0].unique().tolist():
        features = image_features(model, images.inputs(urls[index])).to(result.dtype)
        places = (image == index).nonzero().squeeze(1)
        picked = features.index_select(0, placed(rows[places], device))
        result = result.index_copy(0, placed(places, device), picked)
    return result


def image_features(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the features that the vision tower and the layers after it make of an image, [features, H]."""
    whole = unwrapped(model)
    device = whole.get_input_embeddings().weight.device
    encoded = whole.get_image_features(**{name: placed(tensor, device) for name, tensor in inputs.items()})
    features = encoded.pooler_output
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


def outside_decoder(model: nn.Module, decoder: nn.Module) -> list[str]:
    """Return the names of the linear layers of the vision tower and its projection."""
    inside = {id(module) for module in decoder.modules()}
    head = unwrapped(model).get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside and module is not head
    ]
