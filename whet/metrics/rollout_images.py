"""The images of recorded messages: each is one file in ``rollouts/images``, named by its hash, for all the answers to
it. In a record its URL is the name of the file, ``images/<SHA-256>.png``."""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from whet.base.errors import DataError
from whet.base.files import write_atomically
from whet.core.content import Part, image_urls
from whet.core.types import Message
from whet.fetch.images import content_of_url

_KINDS = {"png": "image/png", "jpg": "image/jpeg"}
_NAME = re.compile(r"images/[0-9a-f]{64}\.(png|jpg)")


def storing(folder: Path) -> Callable[[Sequence[Message]], list[Message]]:
    """Return a function that writes the images of messages into ``folder`` and returns the messages with their
    names."""

    @cache
    def store(url: str) -> str:
        suffix = next((suffix for suffix, kind in _KINDS.items() if url.startswith(f"data:{kind};base64,")), None)
        if suffix is None:
            return url
        try:
            content = content_of_url(url)
        except DataError:
            return url
        name = f"images/{hashlib.sha256(content).hexdigest()}.{suffix}"
        path = folder / name
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        return name

    return lambda messages: _with_urls(messages, store)


def restoring(folder: Path) -> Callable[[Sequence[Message]], list[Message]]:
    """Return a function that returns messages with the data URLs of their images. The name of a file that is missing
    stays."""

    @cache
    def restore(url: str) -> str:
        name = _NAME.fullmatch(url)
        if name is None:
            return url
        try:
            content = (folder / url).read_bytes()
        except OSError:
            return url
        return f"data:{_KINDS[name[1]]};base64,{base64.b64encode(content).decode()}"

    return lambda messages: _with_urls(messages, restore)


def _with_urls(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    if not image_urls(messages):
        return list(messages)

    def changed(part: Part) -> Part:
        return {"type": "image", "url": change(part["url"])} if part["type"] == "image" else part

    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": [changed(part) for part in message["content"]]}
        for message in messages
    ]
