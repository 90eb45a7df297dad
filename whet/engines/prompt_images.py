"""The images of a prompt for engines whose own code reads them: the prompt has a mark for each image, which the engine
replaces by the image's tokens."""

from collections.abc import Sequence

from whet.base.errors import WhetError
from whet.fetch.images import open_image, read_image
from whet.models.image_processor import ImageProcessor


def check_reading(prompt: Sequence[int], theirs: Sequence[int] | None, images: ImageProcessor, engine: str) -> None:
    """Raise ``WhetError`` if an engine reads a prompt as other tokens than the learner, which learns from them."""
    ours = images.marked(prompt)
    if theirs is not None and list(theirs) != ours:
        raise WhetError(
            f"{engine} reads the images of a prompt as {len(theirs)} tokens that differ from the {len(ours)} of the "
            "model's processor; sample with generator=torch"
        )


def opaque(url: str) -> str:
    """Return the data URL of an image without transparency, as the model's processor sees it: servers take what is
    transparent as white."""
    image = open_image(url)
    return url if image.mode == "RGB" else read_image(image.convert("RGB"))
