"""Images in a model: the tokens and inputs that its processor makes of an image, and the features of its vision tower,
which take the places of embeddings."""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.base.errors import DataError, WhetError
from whet.base.extras import extra
from whet.core.batch import Batch
from whet.core.images import placeholders
from whet.data.images import open_image
from whet.models.attention.forest import unwrapped
from whet.models.device import placed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # what is not for the vision tower


class ImageProcessor:
    """The image processor of a model. Its results are kept for the images that were used last."""

    def __init__(self, processor: Any, feature_id: int) -> None:
        """``feature_id``: the token in whose places the model puts features, ``image_token_id`` of its config."""
        self._processor = processor
        self._feature_id = feature_id
        self.mark: int = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        """The token that a chat template writes for an image."""
        self._tokens = lru_cache(maxsize=4096)(self._tokens_of)
        self._processed = lru_cache(maxsize=64)(self._process)

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
        ids = self._processed(url)["input_ids"][0].tolist()
        ours = iter(placeholders(url, ids.count(self._feature_id)))
        return tuple(next(ours) if id == self._feature_id else id for id in ids)

    def marked(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens as the model's own code and the tokenizer have them, the same for every image."""
        return [self._feature_id if token < 0 else token for token in tokens]

    def size(self, url: str) -> int:
        """Return the number of an image's features."""
        return sum(token < 0 for token in self.tokens(url))

    def inputs(self, urls: Sequence[str]) -> dict[str, Tensor]:
        """Return the inputs of a vision tower for images whose inputs have the same shapes."""
        each = [self._processed(url) for url in urls]
        return {name: torch.cat([processed[name] for processed in each]) for name in each[0] if name not in _TEXT}

    def alike(self, urls: Sequence[str]) -> list[list[int]]:
        """Return the indices of images whose inputs have the same shapes together."""
        parts = defaultdict[tuple[torch.Size, ...], list[int]](list)
        for index, url in enumerate(urls):
            parts[tuple(tensor.shape for name, tensor in self._processed(url).items() if name not in _TEXT)].append(
                index
            )
        return list(parts.values())

    def _process(self, url: str) -> dict[str, Tensor]:
        made = self._processor(
            text=self._processor.image_token,
            images=[open_image(url).convert("RGB")],
            add_special_tokens=False,
            return_tensors="pt",
        )
        return dict(made)


def embedded(model: nn.Module, batch: Batch, images: ImageProcessor) -> Tensor:
    """Return the embeddings of a batch's tokens, [N, H], with the features of its images in their places. Raises
    ``DataError`` for a part of an image."""
    assert batch.image is not None
    embedding = unwrapped(model).get_input_embeddings()
    device = embedding.weight.device
    result: Tensor = embedding(placed(batch.tokens.clamp(min=0), device))
    for part in images.alike(batch.images):
        urls = [batch.images[index] for index in part]
        features = image_features(model, images.inputs(urls)).to(result.dtype)
        for index, rows in zip(part, features.split([images.size(url) for url in urls]), strict=True):
            places = (batch.image == index).nonzero().squeeze(1)
            copies, rest = divmod(len(places), len(rows))
            if rest:
                raise DataError(f"an image of {len(rows)} tokens has {len(places)} places in the batch: it was cut")
            result = result.index_copy(0, placed(places, device), rows.repeat(copies, 1))
    return result


def image_features(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return what the vision tower makes of images, [features, H] in their order."""
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
