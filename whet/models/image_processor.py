"""The processor of a model that reads images: it makes the tokens that stand for an image and the inputs of the vision
tower. And positions of three numbers, of time, height and width (M-RoPE, arXiv 2409.12191, section 2.1).

The three are equal for a token of text. The tokens of an image have one time and their places in its grid, and the text
after an image continues after the larger side of the grid, not after the number of its tokens."""

import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from whet.base.errors import DataError, WhetError
from whet.base.extras import extra
from whet.core.images import images_of, placeholders
from whet.fetch.images import open_image

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

_KINDS = {"token_type_ids", "mm_token_type_ids"}  # 1 for a token of an image, 0 for text
_TEXT = {"input_ids", "attention_mask", *_KINDS}  # what is not for the vision tower

LooksAhead = Literal["everywhere", "in windows"]
"""The layers in which the tokens of an image attend to all of it: all layers, or those with a sliding window."""

Grid = tuple[int, int]
"""The rows and columns of an image's features."""


class ImageProcessor:
    """The image processor of a model, for the renderer, the engine and the learner of a process: their threads take
    turns. It keeps the tokens of images, but not the inputs, which are large."""

    def __init__(
        self,
        folder: Path,
        processor: "ProcessorMixin",
        feature_id: int,
        merged: int | None = None,
        looks_ahead: LooksAhead | None = None,
    ) -> None:
        """``folder``: of the model, with the processor's files. ``feature_id``: the token in whose places the model
        puts features, ``image_token_id`` of its config. ``merged``: the number of rows, and of columns, of patches in a
        feature, for a model with positions of three numbers. ``looks_ahead``: the layers in which the tokens of an
        image attend to all of it; None: there are none."""
        self.folder = folder
        self._processor = processor
        self.looks_ahead = looks_ahead
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
        decoder: Any = config.get_text_config()
        rope = getattr(decoder, "rope_parameters", None) or {}
        merged = config.vision_config.spatial_merge_size if "mrope_section" in rope else None
        looks_ahead: LooksAhead | None = "everywhere" if config.model_type == "gemma3" else None
        if getattr(decoder, "use_bidirectional_attention", None) == "vision":  # Gemma 4
            looks_ahead = "in windows"
        return cls(folder, processor, feature_id, merged, looks_ahead)

    @property
    def with_grids(self) -> bool:
        """True if the positions of the model's tokens have three numbers; see ``whet.models.image_processor``."""
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

    def check_reading(self, prompt: Sequence[int], theirs: Sequence[int] | None, engine: str) -> None:
        """Raise ``WhetError`` if an engine, whose own code puts the images into a prompt, reads it as other tokens than
        the learner, which learns from them. ``theirs``: the tokens that it read; None: it doesn't tell."""
        ours = self.marked(prompt)
        if theirs is not None and list(theirs) != ours:
            raise WhetError(
                f"{engine} reads the images of a prompt as {len(theirs)} tokens that differ from the {len(ours)} of "
                "the model's processor; sample with generator=torch"
            )

    def folded(self, tokens: Sequence[int], urls: Sequence[str]) -> tuple[list[int], list[str]]:
        """Return the tokens as a chat template writes them, with one mark for each image, and the images in the order
        of their marks. ``urls``: the images that the tokens may have. Raises ``DataError`` for a part of an image."""
        self.check(tokens, urls)
        images = {url: list(self.tokens(url)) for url in dict.fromkeys(urls)}
        begins = {of_image[0] for of_image in images.values()}
        text, order, place = list[int](), list[str](), 0
        while place < len(tokens):
            here = images if tokens[place] in begins else ()
            url = next((url for url in here if list(tokens[place : place + len(images[url])]) == images[url]), None)
            text.append(tokens[place] if url is None else self.mark)
            order += [] if url is None else [url]
            place += 1 if url is None else len(images[url])
        if min(text) < 0:
            raise DataError("an image has lost the text that its processor writes around it: it was cut")
        return text, order

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
        try:
            with self._lock:
                made = self._processor(
                    text=self._processor.image_token, images=[image], add_special_tokens=False, return_tensors="pt"
                )
        except ValueError as error:
            size = f"{image.width} x {image.height}"
            raise DataError(f"the model's processor can't read an image of {size} pixels: {error}") from error
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


def load_processor(folder: Path, config: "PretrainedConfig") -> object:
    """Return the processor of a model without its parts for videos and audio, which may need other packages: they take
    no part in the tokens and pixels of images."""
    from transformers import AutoProcessor

    whole = _processor_class(config)
    if whole is None:
        return AutoProcessor.from_pretrained(folder)
    names = whole.get_attributes()
    kept = [name for name in names if name in ("image_processor", "tokenizer")]

    kept_alone: Any = type(whole.__name__, (whole,), {"get_attributes": classmethod(lambda _: kept)})

    def arguments(_: type, *args: object, **settings: object) -> list[object]:
        parts = dict(zip(kept, kept_alone._get_arguments_from_pretrained(*args, **settings), strict=True))
        return [parts.get(name) for name in names]

    def check(self: object, name: str, part: object) -> object:
        return None if part is None else whole.check_argument_for_proper_class(self, name, part)

    methods = {"_get_arguments_from_pretrained": classmethod(arguments), "check_argument_for_proper_class": check}
    without_others: Any = type(whole.__name__, (whole,), methods)
    module: Any = import_module(whole.__module__)
    if vars(module).get("num2words", _refuse) is None:
        module.num2words = _refuse  # SmolVLM's asks for this package, which writes the numbers of frames
    return without_others.from_pretrained(folder)


def _processor_class(config: "PretrainedConfig") -> Any:
    """Return the class of a model's processor, None if transformers has none. Gemma 4's takes two names from its module
    for torchvision, which the one for Pillow has, too."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        return PROCESSOR_MAPPING.get(type(config), None)
    except ModuleNotFoundError:
        package = type(config).__module__.rpartition(".")[0]
        family = package.rpartition(".")[2]
        for_torchvision = f"{package}.image_processing_{family}"
        sys.modules[for_torchvision] = import_module(f"{package}.image_processing_pil_{family}")
        try:
            return PROCESSOR_MAPPING.get(type(config), None)
        finally:
            del sys.modules[for_torchvision]


def _refuse(*_: object) -> str:
    raise WhetError("videos are refused")


def grid_positions(
    place: Tensor, start: Sequence[int], parent: Sequence[int], image: Tensor, row: Tensor, grids: Sequence[Grid]
) -> Tensor:
    """Return the positions of tokens in a forest of segments, [3, N].

    ``place``, [N]: the number of tokens before each one in its segment and the ancestors. ``start``,
    ``parent``: the first token and the parent of each segment, -1 for a root; parents come before children.
    ``image``, [N]: the index of each token's image in ``grids``, -1 for text. ``row``, [N]: the number of each token
    among the features of its image.
    """
    jump = torch.zeros_like(place)  # what an image changes for the tokens after it, at its last token
    offset = torch.zeros(3, len(place), dtype=place.dtype)  # from the first token of an image
    for index, (height, width) in enumerate(grids):
        inside = image == index
        jump[inside & (row == height * width - 1)] = max(height, width) - height * width
        offset[1, inside] = row[inside] // width
        offset[2, inside] = row[inside] % width
    total = torch.cat([jump.new_zeros(1), jump.cumsum(0)])
    entering: list[int] = []  # the sum of the jumps in a segment's ancestors
    ends = [*start[1:], len(place)]
    for above in parent:
        inherited = 0 if above < 0 else entering[above] + int(total[ends[above]] - total[start[above]])
        entering.append(inherited)
    first, length = torch.tensor(start), torch.tensor(ends) - torch.tensor(start)
    before = total[:-1] + (torch.tensor(entering) - total[first]).repeat_interleave(length)
    return place + before - torch.where(image < 0, 0, row) + offset
