"""The processor of a model that reads images: it makes the tokens that stand for an image and the inputs of the vision
tower."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.base.errors import DataError, WhetError
from whet.base.extras import extra
from whet.core.images import images_of, placeholders
from whet.fetch.images import open_image
from whet.models.positions import Grid

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KINDS = {"token_type_ids", "mm_token_type_ids"}  # 1 for a token of an image, 0 for text
_TEXT = {"input_ids", "attention_mask", *_KINDS}  # what is not for the vision tower


class ImageProcessor:
    """The image processor of a model, for the renderer, the engine and the learner of a process: their threads take
    turns. It keeps the tokens of images, but not the inputs, which are large."""

    def __init__(self, processor: Any, feature_id: int, merged: int | None = None) -> None:
        """``feature_id``: the token in whose places the model puts features, ``image_token_id`` of its config.
        ``merged``: the number of rows, and of columns, of patches in a feature, for a model with positions of three
        numbers."""
        self._processor = processor
        self._feature_id = feature_id
        self._merged = merged
        self.mark: int = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        """The token that a chat template writes for an image."""
        self._lock = Lock()  # fast tokenizers can't be used by two threads at once
        self._seen = lru_cache(maxsize=4096)(self._see)

    @classmethod
    def of(cls, folder: Path, config: "PretrainedConfig") -> "ImageProcessor":
        """Return the processor of the model in a folder. Raises ``WhetError`` if it has none that can be used."""
        with extra("images", "model.vision"):
            import PIL.Image  # noqa: F401
        feature_id = getattr(config, "image_token_id", None)
        try:
            processor = load_processor(folder, config)
        except (OSError, ValueError, ImportError, TypeError) as error:
            text = str(error).strip().partition("\n")[0]
            raise WhetError(f"model.vision: the processor of images in {folder} can't be loaded: {text}") from error
        if feature_id is None or not hasattr(processor, "image_token"):
            raise WhetError(
                f"model.vision: the model in {folder} has no processor of images with an image_token; leave "
                "model.vision out to train its text part, if it has one"
            )
        rope: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
        merged = config.vision_config.spatial_merge_size if "mrope_section" in rope else None
        return cls(processor, feature_id, merged)

    @property
    def with_grids(self) -> bool:
        """True if the positions of the model's tokens have three numbers; see ``whet.models.positions``."""
        return self._merged is not None

    def tokens(self, url: str) -> Sequence[int]:
        """Return the tokens that stand for an image, with the text that the processor writes around them."""
        return self._seen(url)[0]

    def grid(self, url: str) -> Grid:
        """Return the rows and columns of an image's features, for a model ``with_grids``."""
        return self._seen(url)[1]

    def _see(self, url: str) -> tuple[tuple[int, ...], Grid]:
        made = self._process(url)
        ids = made["input_ids"][0].tolist()
        count = ids.count(self._feature_id)
        ours = iter(placeholders(url, count))
        tokens = tuple(next(ours) if id == self._feature_id else id for id in ids)
        if self._merged is None:
            return tokens, (1, count)
        height, width = (made["image_grid_thw"][0, 1:] // self._merged).tolist()
        return tokens, (height, width)

    def marked(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens as the model's own code and the tokenizer have them, the same for every image."""
        return [self._feature_id if token < 0 else token for token in tokens]

    def size(self, url: str) -> int:
        """Return the number of an image's features."""
        return sum(token < 0 for token in self.tokens(url))

    def inputs(self, url: str) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for an image."""
        return {name: tensor for name, tensor in self._process(url).items() if name not in _TEXT}

    def kinds(self, url: str, tokens: Sequence[int]) -> dict[str, Tensor]:
        """Return the arguments, [1, N], that tell the model's own code which tokens belong to images, if it takes any.
        ``url``: an image, which is processed to know their names."""
        of_image = torch.tensor([[int(token < 0) for token in tokens]])
        return {name: of_image for name in self._process(url) if name in _KINDS}

    def check(self, prompt: Sequence[int], urls: Sequence[str]) -> None:
        """Raise ``DataError`` for placeholders of other images, or of a part of an image."""
        different, column = images_of([prompt], [urls])
        feature_rows(torch.from_numpy(column), different, self)

    def _process(self, url: str) -> dict[str, Tensor]:
        image = open_image(url).convert("RGB")
        with self._lock:
            made = self._processor(
                text=self._processor.image_token, images=[image], add_special_tokens=False, return_tensors="pt"
            )
        return dict(made)


def feature_rows(image: Tensor, urls: Sequence[str], images: ImageProcessor) -> Tensor:
    """Return the number of each token among the features of its image, 0 for other tokens, [N]. ``image``, [N]: the
    index of each token's image, -1 for other tokens."""
    rows = torch.zeros_like(image)
    for index, url in enumerate(urls):
        places, size = (image == index).nonzero().squeeze(1), images.size(url)
        if len(places) % size:
            raise DataError(f"an image of {size} tokens has {len(places)} places among the tokens: it was cut")
        rows[places] = torch.arange(len(places)) % size
    return rows


def load_processor(folder: Path, config: "PretrainedConfig") -> Any:
    """Return the processor of a model without its part for videos, which would need torchvision: it takes no part in
    the tokens and pixels of images."""
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    whole: Any = PROCESSOR_MAPPING.get(type(config), None)
    if whole is None:
        return AutoProcessor.from_pretrained(folder)
    parts = [part for part in whole.get_attributes() if "video" not in part]
    without_videos = type(whole.__name__, (whole,), {"get_attributes": classmethod(lambda _: parts)})
    return without_videos.from_pretrained(folder)  # type: ignore[attr-defined]
