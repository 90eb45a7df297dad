"""Rows of conversations. Each message is validated, and the order of messages must allow training on the replies."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from whet.base.strict_json import STRICT, JsonObject
from whet.core.content import content_of, image_urls, words_of
from whet.core.roles import problem_of
from whet.core.types import Message
from whet.data.forms import conversation
from whet.data.image_rows import data_part, with_images
from whet.data.messages import SystemText, after_system, after_system_if_whole, is_call, not_read, with_object
from whet.data.row import Row, missing, unicode


def _message(value: dict[str, object]) -> dict[str, object]:
    calls, content = value.get("tool_calls"), value.get("content")
    if not isinstance(value.get("role"), str):
        raise ValueError("must be a message with a 'role' and a 'content'")
    if problem := problem_of({"role": value["role"]}) or not_read(value):
        raise ValueError(problem)
    if calls is not None and not (isinstance(calls, list) and all(map(is_call, calls))):
        raise ValueError("must hold 'tool_calls' that are a list of calls with the name of a function")
    if content is None and calls:
        content = ""  # as the OpenAI API has it for a reply that only calls tools
    if not isinstance(content, str | list):
        raise ValueError("must be a message whose 'content' is a text")
    content = content_of(content, None if value["role"] == "assistant" else data_part)
    text = unicode(words_of(content))
    if value["role"] == "assistant" and not text.strip() and not calls:
        raise ValueError("must not be an empty reply")
    kept = {key: part for key, part in value.items() if key != "tool_calls"}
    kept |= {"tool_calls": [with_object(call) for call in calls]} if calls else {}
    return kept | {"content": text if value["role"] == "assistant" else content}


_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")


def _said_by(role: str) -> Callable[[object], object]:
    def messages(value: Any) -> object:
        if isinstance(value, str) and _MESSAGES_AS_TEXT.match(value):
            raise ValueError("must be a list of messages, not the text of its JSON")
        if isinstance(value, str) and value.strip():
            return [{"role": role, "content": value}]
        if not isinstance(value, list) or not value:
            raise ValueError("must be a text or a list of messages that is not empty")
        return value

    return messages


_Messages = list[Annotated[dict[str, Any], AfterValidator(_message)]]
Asked = Annotated[_Messages, BeforeValidator(_said_by("user")), AfterValidator(after_system)]  # a text, or messages
Answered = Annotated[_Messages, BeforeValidator(_said_by("assistant"))]
Judged = Annotated[Answered, AfterValidator(after_system_if_whole)]


@dataclass(slots=True, frozen=True)
class Answer:
    """A conversation that ends with a reply to train on."""

    field: str  # the row's field with the reply
    messages: list[Message]
    reward: float = 0.0


def _of_json(tools: object) -> object:
    """Return the tools, which tables have as a text of JSON because the objects differ."""
    if not isinstance(tools, str):
        return tools
    try:
        return STRICT.decode(tools)
    except ValueError as problem:
        raise ValueError(f"must be a list of tools, or its JSON: {problem}") from None


class Example(Row, ABC):
    """A row of one or more answers to one question, the ``system`` text before it, and the ``tools`` that may be
    called."""

    system: SystemText = None
    tools: Annotated[
        list[JsonObject] | None, BeforeValidator(_of_json), AfterValidator(lambda tools: tools or None)
    ] = None

    @classmethod
    def prepared(cls, values: JsonObject, folder: Path | None) -> dict[str, object]:
        return with_images(conversation(values) if cls.in_published_forms else values, folder)

    in_published_forms: ClassVar[bool] = True
    """False: published forms, such as that of Alpaca, are not brought into the fields of this class."""
    fields: ClassVar[tuple[str, ...]] = ("messages",)
    """The fields of ``output``, without the optional ``tools``."""
    compared: ClassVar[tuple[str, ...]] = ()
    """The fields in which duplicates and evaluation text are looked for; empty: all."""

    @property
    @abstractmethod
    def answers(self) -> list[Answer]:
        """Return the answers to train on. Raises ``ValueError`` naming a missing field."""

    @property
    def question(self) -> list[Message]:
        """Return the messages before the reply."""
        return self.answers[0].messages[:-1]

    def _check_question(self, prompt: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` for a column that belongs to the question next to a prompt."""
        for name in _MORE_OF_THE_QUESTION:
            more = (self.model_extra or {}).get(name)
            written = name == "instruction" and isinstance(more, str) and more.strip() in _words(prompt)
            if isinstance(more, str) and more.strip() and not written:
                raise ValueError(f"field {name!r} belongs to the question, and is not read: append it to the prompt")

    def output(self) -> JsonObject:
        """Return the row as JSON values, in the fields of this class regardless of its published form."""
        return {"messages": self.answers[0].messages} | ({"tools": self.tools} if self.tools else {})

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for answer in self.answers:
            _check(answer.field, answer.messages)
        return self


_MORE_OF_THE_QUESTION = ("instruction", "input", "context")  # of Alpaca and Dolly
_SCORES = [  # columns of published pairs
    (form.format("chosen"), form.format("rejected")) for form in ("{}_score", "score_{}", "{}_rating", "{}_avg_rating")
]
_WHICH_IS_BETTER = ("overall_preference", "preference_strength", "labels", "winner")  # of HelpSteer, SHP, Arena


class Conversation(Example):
    """``messages``, or ``prompt`` and ``completion``, each a text or a list of messages."""

    messages: Asked = Field(default=[])
    prompt: Asked = Field(default=[])
    completion: Answered = Field(default=[])

    @classmethod
    def of(
        cls,
        where: str,
        values: JsonObject,
        as_texts: bool = False,
        columns: Mapping[str, str] | None = None,
        image_folder: str | None = None,
    ) -> Self:
        """See ``Row.of``. A row whose prompt or completion is renamed by ``columns`` is read from these, also if the
        file has ``messages``."""
        renamed = (columns or {}).keys() & values.keys()
        if renamed & {"prompt", "completion"} and "messages" not in renamed:
            values = {name: value for name, value in values.items() if name != "messages"}
        return super().of(where, values, as_texts, columns, image_folder)

    @property
    def answers(self) -> list[Answer]:
        if self.messages:
            return [Answer("messages", as_messages(self.messages))]
        for name in ("prompt", "completion"):
            if name not in self.model_fields_set:
                self._check_no_conversation_is_unread()
                raise ValueError(missing(name, sorted(self.model_fields_set)))
        self._check_question(self.prompt)
        return [Answer("completion", as_messages(self.prompt + self.completion))]

    def _check_no_conversation_is_unread(self) -> None:
        """Raise ``ValueError`` if a field that is not read holds a list of messages."""
        for field, value in (self.model_extra or {}).items():
            objects = value if isinstance(value, list) and all(isinstance(each, dict) for each in value) else []
            for name, key in (("messages", "role"), ("conversations", "from")):
                if objects and all(key in each for each in objects):
                    raise ValueError(
                        f"field {field!r} holds a conversation, which is read from {name!r}: set "
                        f"columns={{{name}: {field}}}"
                    )


class Scored(Conversation):
    """A conversation and the ``score`` of its last reply."""

    fields = ("messages", "score")

    score: float

    def output(self) -> dict[str, object]:
        return {**super().output(), "score": self.score}

    @property
    def answers(self) -> list[Answer]:
        return [replace(answer, reward=self.score) for answer in super().answers]


class Labelled(Conversation):
    """A conversation and a ``label``: whether its last reply is good."""

    fields = ("messages", "label")

    label: bool

    def output(self) -> JsonObject:
        return {**super().output(), "label": self.label}

    @property
    def answers(self) -> list[Answer]:
        return [replace(answer, reward=float(self.label)) for answer in super().answers]


class Pair(Example):
    """Two answers to one question, the better one first."""

    fields = ("prompt", "chosen", "rejected")

    def output(self) -> dict[str, object]:
        asked = self.question
        chosen, rejected = (answer.messages[len(asked) :] for answer in self.answers)
        pair = {"prompt": asked, "chosen": chosen, "rejected": rejected}
        return pair | ({"tools": self.tools} if self.tools else {})


class Preference(Pair):
    """``chosen`` and ``rejected``, each a text or a list of messages, and the ``prompt`` of both. Without a prompt, the
    messages that both begin with are the prompt."""

    prompt: Asked = Field(default=[])
    chosen: Judged
    rejected: Judged

    @property
    def question(self) -> list[Message]:
        chosen, rejected = as_messages(self.chosen[:-1]), as_messages(self.rejected[:-1])
        pairs = takewhile(lambda pair: _alike(pair[:1], pair[1:]), zip(chosen, rejected, strict=False))
        return as_messages(self.prompt) or [message for message, _ in pairs]

    @property
    def answers(self) -> list[Answer]:
        for name in _WHICH_IS_BETTER:
            if name in (self.model_extra or {}):
                raise ValueError(
                    f"field {name!r} says which of two answers is better, and is not read: put the better one into "
                    f"'chosen', the other one into 'rejected', and leave {name!r} out"
                )
        self._check_scores()
        if self.prompt:
            self._check_question(self.prompt)
        prompt, size = self.question, len(self.question)
        if not prompt and len(self.chosen) == len(self.rejected) == 1:
            raise ValueError(missing("prompt", sorted(self.model_fields_set)))
        if not prompt:
            raise ValueError("fields 'chosen' and 'rejected' must begin with the same message, which is the prompt")
        chosen, rejected = as_messages(self.chosen), as_messages(self.rejected)
        if _alike(chosen[:size], prompt) and _alike(rejected[:size], prompt):  # both repeat it
            chosen, rejected = chosen[size:], rejected[size:]
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if answer and prompt[-1]["role"] == answer[0]["role"] == "user":
                raise ValueError(
                    f"field {name!r} must begin with the same prompt as the field 'prompt', or without one"
                )
            if not answer:
                raise ValueError(f"field {name!r} must hold an answer after the prompt")
        return [Answer("chosen", prompt + chosen, 1.0), Answer("rejected", prompt + rejected, 0.0)]

    def _check_scores(self) -> None:
        """Raise ``ValueError`` if the scores of both answers say that the rejected one is better."""
        for names in _SCORES:
            values = [(self.model_extra or {}).get(name) for name in names]
            try:
                chosen, rejected = (float(cast(Any, value)) for value in values)
            except (TypeError, ValueError):  # not both are numbers
                continue
            if chosen < rejected:
                raise ValueError(
                    f"field {names[0]!r} is {chosen:g} and {names[1]!r} is {rejected:g}, so the rejected answer is the "
                    "better one: exchange 'chosen' and 'rejected', drop the row, or leave the scores out"
                )


class Prompt(Example):
    """A ``prompt``, a text or messages, for the policy to answer. All other columns are kept unchanged for the reward,
    which mostly reads the reference ``answer``."""

    fields = ("prompt",)
    compared: ClassVar[tuple[str, ...]] = ("system", "prompt", "answer")

    in_published_forms = False  # a reward reads the columns by the names that they have in the file
    tools: Any = None
    prompt: Asked

    @property
    def answers(self) -> list[Answer]:
        return []

    @property
    def question(self) -> list[Message]:
        return as_messages(self.prompt)

    @property
    def declared(self) -> list[dict[str, object]] | None:
        """Return the tools that the prompt shows to the policy, if any."""
        return None

    def output(self) -> JsonObject:
        return self.given


def _alike(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    """Return whether the messages are equal once their texts are joined."""
    return image_urls(messages) == image_urls(others) and _joined(messages) == _joined(others)


def _words(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(words_of(message["content"]) for message in messages)


def _joined(messages: Sequence[Message]) -> list[Message]:
    return [message | {"content": words_of(message["content"])} for message in messages]


def as_messages(checked: list[dict[str, object]]) -> list[Message]:
    """Return checked messages under their type."""
    return cast(list[Message], checked)


def _check(name: str, messages: list[Message]) -> None:
    """Raise ``ValueError`` unless the messages begin with another message than a reply, end with a reply, and never
    have two replies in a row."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies or replies[-1] != len(messages) - 1:
        raise ValueError(f"field {name!r} must end with a reply of the assistant")
    if replies[0] == 0:
        raise ValueError(f"field {name!r} must have a message before the first reply")
    if any(after == before + 1 for before, after in pairwise(replies)):
        raise ValueError(f"field {name!r} must not hold two replies in a row")
