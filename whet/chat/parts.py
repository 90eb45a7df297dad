"""Contents in parts, passed to a chat template as parts if it writes their texts or they have images, and otherwise
as text."""

import contextlib
from collections.abc import Callable, Sequence

from whet.base.errors import DataError
from whet.chat.control_tokens import ControlTokens
from whet.core.content import image_urls, in_text
from whet.core.types import Message


def render_contents(
    control: ControlTokens,
    render: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    images: bool = False,
) -> str:
    """Return ``render`` of the messages, a hidden rendering of ``control``. Parts are kept where that changes nothing
    but white space, or where there are ``images``, which the template marks; replies are always rendered as text.
    Raises ``DataError`` naming a message with another part than text or, where it is allowed, an image."""
    if images and image_urls(messages):
        return render([_without_urls(message) for message in messages])
    texts = in_text(messages)
    rendered = render(texts)
    if all(isinstance(message["content"], str) for message in messages):
        return rendered
    pairs = zip(messages, texts, strict=True)
    with contextlib.suppress(DataError):  # the template takes no parts
        in_parts = render([text if text["role"] == "assistant" else message for message, text in pairs])
        if control.alike(in_parts, rendered):
            return in_parts
    return rendered


def _without_urls(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str) or not image_urls([message]):
        return message
    return message | {"content": [part if part["type"] == "text" else {"type": "image", "url": ""} for part in content]}
