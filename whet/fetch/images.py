"""Images of rows, requests and tools as data URLs, ``data:image/png;base64,...`` or ``data:image/jpeg;base64,...``.

An image is decoded as a whole when it is read, so that a damaged file is an error with its place and not a failure in
the middle of a run. PNG and JPEG files stay as they are, byte for byte; others become PNG.
"""

import base64
import binascii
import hashlib
import io
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from whet.base.errors import DataError
from whet.base.extras import extra
from whet.base.files import expanded
from whet.fetch.download import fetch_file

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 20_000_000
"""Bytes of an image's file."""
MOST_PIXELS = 50_000_000
"""Pixels of an image. A small file can declare any number of them, so this is checked before it is decoded."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_KEPT = {"PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg"}
_MODES = {"1", "L", "LA", "P", "RGB", "RGBA"}  # of pixels, as browsers and processors take them
_ORIENTATION = 0x0112  # the tag of Exif by which viewers turn a photograph
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")
_DEADLINE = 120.0  # seconds for a download
_RECENT = 8  # images that are kept: rows next to each other often have the same one, which is then held once


def read_image(value: object, folder: Path | None = None) -> str:
    """Return the data URL of an image: of a data URL, the path of a file in ``folder``, the address of a file with its
    hash (``https://...#sha256=...``, fetched once and cached), the content of a file as bytes, an object with one of
    these under ``bytes``, ``path`` or ``url``, as data sets have it, or an image of Pillow. ``folder``: None allows
    neither paths nor addresses. Raises ``DataError``, without a place, for anything else and for an image that is
    damaged or too large.

    >>> read_image("cat.png", Path("rows"))
    Traceback (most recent call last):
    whet.base.errors.DataError: can't read the image rows/cat.png: No such file or directory
    """
    match value:
        case str(text) if text.startswith("data:"):
            return data_url(content_of_url(text))
        case str() | Path():
            return _read_named(str(value), folder)
        case bytes(content):
            return data_url(content)
        case {"bytes": bytes(content)}:
            return data_url(content)
        case {"bytes": str(source)} | {"path": str(source)} | {"url": str(source)}:
            return read_image(source, folder)
    if is_image(value):
        with _reading():
            return _checked_url(value)
    kind = f"an object of {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
    raise DataError(f"an image must be a path, an address with a hash, a data URL or the bytes of a file, not {kind}")


def source_of(part: Mapping[str, object]) -> object:
    """Return the value for ``read_image`` in a part of a content, in the form of OpenAI's or Anthropic's API, of
    ``datasets`` or of whet; None for a placeholder."""
    match part:
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)} | {"source": {"type": "url", "url": str(url)}}:
            return url
        case {"source": {"type": "base64", "media_type": str(kind), "data": str(text)}}:
            return f"data:{kind};base64,{text}"
    return next(
        (part[name] for name in ("url", "image", "path", "bytes", "source") if part.get(name) is not None), None
    )


def data_url(content: bytes) -> str:
    """Return the data URL of an image's file. Raises ``DataError`` if it is damaged, too large, has several frames or
    another format than PNG, JPEG, WebP, GIF and BMP."""
    if len(content) > MOST_BYTES:
        raise DataError(f"the image has {len(content):,} bytes, and at most {MOST_BYTES:,} are allowed")
    return _url_of_file(bytes(content))


@lru_cache(maxsize=_RECENT)
def _url_of_file(content: bytes) -> str:
    with _reading():
        image = _decoded(content)
        kind = _KEPT.get(image.format or "")
        if kind and image.mode in _MODES and image.getexif().get(_ORIENTATION, 1) == 1:
            return _url(kind, content)
        return _checked_url(image)


def content_of_url(url: str) -> bytes:
    """Return the bytes of the file in a data URL. Raises ``DataError`` for another text."""
    head = _DATA.match(url)
    if head is None:
        raise DataError(f"not the data URL of an image (data:image/png;base64,...): {url[:40]!r}")
    if len(url) - head.end() > MOST_BYTES * 4 // 3 + 4:
        raise DataError(f"the image has more than {MOST_BYTES:,} bytes")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as problem:
        raise DataError(f"the data URL of an image is not valid base64: {problem}") from None


def open_image(url: str) -> "Image":
    """Return the decoded image of a data URL. Raises ``DataError`` if it is damaged or too large."""
    with _reading():
        return _decoded(content_of_url(url))


def opaque(url: str) -> str:
    """Return the data URL of an image without transparency, as the model's processor sees it: servers take what is
    transparent as white."""
    image = open_image(url)
    return url if image.mode == "RGB" else read_image(image.convert("RGB"))


def fingerprint(url: str) -> str:
    """Return a text that is equal for equal images, for hashes and comparisons: the SHA-256 of a data URL."""
    return hashlib.sha256(url.encode()).hexdigest()


def _read_named(name: str, folder: Path | None) -> str:
    if folder is None:
        raise DataError(f"only an image itself or its data URL is taken here, not {name[:80]!r}")
    if name.startswith(("https://", "http://")):
        return _read_file(fetch_file(name, ".image", _DEADLINE, MOST_BYTES), name)
    path = _inside(Path(name), folder)
    return _read_file(path, str(path))


def _read_file(path: Path, name: str) -> str:
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"can't read the image {name}: it is not a file")
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"the image {name} has more than {MOST_BYTES:,} bytes")
        content = path.read_bytes()
    except OSError as problem:
        raise DataError(f"can't read the image {name}: {problem.strerror or problem}") from None
    except ValueError as problem:  # a null character in the path
        raise DataError(f"can't read the image {name!r}: {problem}") from None
    try:
        return data_url(content)
    except DataError as problem:
        raise DataError(f"{name}: {problem}") from None


def _inside(path: Path, folder: Path) -> Path:
    """Return the path of a file in the folder. Rows are written by others: their paths must not lead out of it, neither
    directly nor by a link."""
    place = folder / expanded(path) if not path.is_absolute() else path
    try:
        inside = place.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as problem:
        raise DataError(f"can't read the image {str(path)!r}: {problem}") from None
    if not inside:
        raise DataError(
            f"the image {path} is outside of the folder {folder}; set image_folder to a folder that contains it"
        )
    return place


@contextmanager
def _reading() -> Iterator[None]:
    """Turn errors of Pillow, whose readers raise many types, into ``DataError``, and leave out its warnings."""
    with extra("images", "reading images"):
        from PIL import Image
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"the image has more than {MOST_PIXELS:,} pixels") from None
    except Image.UnidentifiedImageError:
        raise DataError(f"not an image in one of the formats {', '.join(_FORMATS)}") from None
    except Exception as problem:
        raise DataError(f"the image is damaged: {problem}") from None


def _decoded(content: bytes) -> "Image":
    from PIL import Image

    image = Image.open(io.BytesIO(content), formats=_FORMATS)
    _check_size(image)
    image.load()
    return image


def _check_size(image: "Image") -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise DataError(f"the image has {width} x {height} pixels, and at most {MOST_PIXELS:,} are allowed")
    if image.format != "MPO" and _moves(image):  # a photograph in MPO is a JPEG with a preview
        raise DataError("the image has several frames; save one of them as PNG")


def _moves(image: "Image") -> bool:
    try:
        image.seek(1)
    except EOFError:
        return False
    return True


def _checked_url(image: "Image") -> str:
    """Return the data URL of an image as PNG, turned as its Exif data say."""
    from PIL import ImageOps

    _check_size(image)
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I;16"):  # Pillow would take all from 255 on as white
        turned = turned.convert("I").point(lambda value: value / 257).convert("L")
    if turned.mode in ("I", "F"):
        raise DataError(f"pixels of Pillow's mode {turned.mode} have no agreed white; convert the image to L or RGB")
    file = io.BytesIO()
    (turned if turned.mode in _MODES else turned.convert("RGB")).save(file, "PNG")
    return _url("image/png", file.getvalue())


def _url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def is_image(value: object) -> TypeGuard["Image"]:
    """Return whether a value is an image of Pillow, without importing it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
