"""Rows that hold their prompt, or a conversation as NeMo Gym publishes it, in ``responses_create_params``."""

from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator

from whet.base.errors import DataError
from whet.core.types import Message
from whet.data.row import Row, Text, missing
from whet.tasks.few_shot import messages

_ROLES = {"developer": "system"}


def _messages(value: Any) -> Any:
    """The messages of ``responses_create_params``: its ``input`` is a text or a list; contents may come in parts."""
    given = value.get("input") if isinstance(value, dict) else None
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) and "role" in item for item in given):
        raise ValueError("must be an object whose 'input' is a text or a list of messages")
    return [{"role": _ROLES.get(item["role"], item["role"]), "content": _text(item.get("content"))} for item in given]


def _text(content: Any) -> Any:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content


def _asks(conversation: list[dict[str, str]]) -> list[dict[str, str]]:
    if not any(message["role"] == "user" and message["content"].strip() for message in conversation):
        raise ValueError("must hold a message of the user")
    return conversation


class GymRow(Row):
    """A row that says what the model is shown."""

    prompt: Text | None = None
    responses_create_params: (
        Annotated[list[dict[str, str]], BeforeValidator(_messages), AfterValidator(_asks)] | None
    ) = None

    @property
    def conversation(self) -> list[Message] | None:
        return cast(list[Message] | None, self.responses_create_params)

    def shown(self, system: str | None) -> list[Message]:
        """Return the conversation, or the prompt after ``system``. Raises ``DataError`` where neither is there."""
        if self.conversation is None and self.prompt is None:
            raise DataError(f"{self.where}: {missing('prompt', self.model_fields_set)}")
        return self.conversation or messages(system, self.prompt or "")
