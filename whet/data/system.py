"""The text of a row's field ``system``. It is the first message of the row's question."""

from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

from whet.core.content import words_of
from whet.data.row import unicode


def _unless_blank(text: str | None) -> str | None:
    return unicode(text) if text and text.strip() else None


SystemText = Annotated[str | None, AfterValidator(_unless_blank)]


def after_system(messages: list[dict[str, Any]], info: ValidationInfo) -> list[dict[str, Any]]:
    """Validate a field with a question: return its messages after the text of ``system``, a field declared before it.
    Raises ``ValueError`` if they begin with another system message."""
    text: str | None = info.data.get("system")
    if text is None:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    if words_of(messages[0]["content"]).strip() != text.strip():
        raise ValueError("must begin with the same system message as the field 'system', or without one")
    return messages


def after_system_if_whole(messages: list[dict[str, Any]], info: ValidationInfo) -> list[dict[str, Any]]:
    """Validate a field with an answer, which may repeat its question. An answer alone begins with a reply."""
    return messages if messages[0]["role"] == "assistant" else after_system(messages, info)
