"""Messages as clients and data sets write them, and how models of pydantic read them."""

from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import GetPydanticSchema
from pydantic_core.core_schema import no_info_plain_validator_function

from whet.core.content import content_of, text_of
from whet.core.types import Message

T = TypeVar("T")


def read_by(read: Callable[[object], T]) -> GetPydanticSchema:
    """Return the annotation of a field whose value is ``read`` of the input."""
    return GetPydanticSchema(lambda *_: no_info_plain_validator_function(read))


def messages_of(value: object) -> list[Message]:
    """Return the role and the content of each message; the content of a reply is a text. Raises ``ValueError``."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of messages that is not empty")
    return [_message(item) for item in value]


Messages = Annotated[list[Message], read_by(messages_of)]


def _message(item: object) -> Message:
    match item:
        case {"role": str(role), "content": content}:
            read = content_of(content)
            return {"role": role, "content": text_of(read) if role == "assistant" else read}
    raise ValueError("must be a list of messages, each with a 'role' and a 'content'")
