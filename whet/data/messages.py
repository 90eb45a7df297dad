"""Messages as clients and data sets write them, and how models of pydantic read them; and the text of a row's field
``system``, the first message of the row's question."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, TypeVar

from pydantic import AfterValidator, GetPydanticSchema, ValidationInfo
from pydantic_core.core_schema import no_info_plain_validator_function

from whet.base.strict_json import STRICT, JsonObject
from whet.core.content import content_of, text_of, words_of
from whet.core.roles import problem_of
from whet.core.types import Message
from whet.data.row import unicode

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
            if problem := problem_of({"role": role}):
                raise ValueError(problem)
            read = content_of(content)
            return {"role": role, "content": text_of(read) if role == "assistant" else read}
    raise ValueError("must be a list of messages, each with a 'role' and a 'content'")


def _unless_blank(text: str | None) -> str | None:
    return unicode(text) if text and text.strip() else None


SystemText = Annotated[str | None, AfterValidator(_unless_blank)]


def after_system(messages: list[JsonObject], info: ValidationInfo) -> list[JsonObject]:
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


def after_system_if_whole(messages: list[JsonObject], info: ValidationInfo) -> list[JsonObject]:
    """Validate a field with an answer, which may repeat its question. An answer alone begins with a reply."""
    return messages if messages[0]["role"] == "assistant" else after_system(messages, info)


def with_object(call: JsonObject) -> JsonObject:
    """Return the call with arguments that are an object. The OpenAI API has them as JSON, which chat templates would
    quote a second time, and tables have a null or an empty list where there are none. Raises ``ValueError`` for other
    arguments."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return call
    decoded: object = None
    if "parameters" not in function and (
        arguments in (None, []) or (isinstance(arguments, str) and not arguments.strip())
    ):
        decoded = {}
    elif isinstance(arguments, str):
        with suppress(ValueError):
            decoded = STRICT.decode(arguments)
    if not isinstance(decoded, dict):
        raise ValueError("must hold 'tool_calls' whose 'arguments' are an object, or its JSON")
    changed = function | {"arguments": decoded}
    return call | {"function": changed} if "function" in call else changed


def is_call(call: object) -> bool:
    """Return whether a value is a call of a tool with the name of a function."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def not_read(message: Mapping[str, object]) -> str:
    """Return why a message can't be read in the sense of its file: it has a mark that leaves its reply out of training,
    or a call in the notation before ``tool_calls``. Empty if it has neither."""
    if message.get("function_call"):
        return "must have its 'function_call' as an item of 'tool_calls'"
    for mark in ("weight", "train", "loss"):
        if message.get(mark) in (0, False) and message.get(mark) is not None:
            return f"must not have '{mark}': {message[mark]}, which is not read: set train_on, or split the row"
    return ""
