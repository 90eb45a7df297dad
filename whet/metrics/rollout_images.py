"""The images of recorded messages: each is one file in ``rollouts/images``, named by its hash, for all the answers to
it. In a record its URL is the name of the file, ``images/<SHA-256>.png``."""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from whet.base.files import write_atomically
from whet.core.content import Part, image_urls
from whet.core.types import Message

_KINDS = {"png": "image/png", "jpg": "image/jpeg"}
_DATA = re.compile(r"data:(image/(?:png|jpeg));base64,")
_NAME = re.compile(r"images/[0-9a-f]{64}\.(png|jpg)")


def storing(folder: Path) -> Callable[[Sequence[Message]], list[Message]]:
    """Return a function that writes the images of messages into ``folder`` and returns the messages with their
    names."""

    @cache
    def store(url: str) -> str:
        kind = _DATA.match(url)
        if kind is None:
            return url
        with suppress(binascii.Error, ValueError):
            content = base64.b64decode(url[kind.end() :], validate=True)
            suffix = next(suffix for suffix, each in _KINDS.items() if each == kind[1])
            name = f"images/{hashlib.sha256(content).hexdigest()}.{suffix}"
            path = folder / name
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content)
            return name
        return url

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
