"""A chat template, and how it takes what templates take differently: thoughts, arguments and ids of calls."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from whet.base.errors import DataError
from whet.base.strict_json import JsonObject
from whet.chat.call_formats import SAMPLES
from whet.chat.calls import counted
from whet.chat.thinking import TAGS, Marks, marks_of, opens_thought, with_thought
from whet.chat.tools_as_text import as_text
from whet.core.content import text_of
from whet.core.types import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = "whetaskswhet"  # in conversations that are rendered only to find the template's texts around it
HARMONY = "<|channel|>"  # in templates of gpt-oss
CALL_ENDS = ("<|call|>", "<|tool_response>", "<|eom_id|>", "<|eom|>")
"""Tokens with which some families end a turn that has calls: gpt-oss, Gemma 4, Llama 3 and 4."""


class ChatTemplate:
    """A chat template with its arguments. Raises ``DataError`` for messages that it can't render."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", text: str, arguments: Mapping[str, object], tools_as_text: bool
    ) -> None:
        self.tokenizer, self.text, self.tools_as_text = tokenizer, text, tools_as_text
        self.arguments = dict(arguments)

    @cached_property
    def marks(self) -> Marks | None:
        """The marks around thoughts; None for a template without thoughts."""
        return marks_of(self.text) or (TAGS if opens_thought(self.question()) else None)

    def apply(self, messages: Sequence[Message], tools: list[JsonObject] | None = None, generate: bool = False) -> str:
        """Return the rendering of messages as ``written`` returns them."""
        return self._apply(
            [_in_parts(message) for message in messages] if self._parts_only else messages, tools, generate
        )

    @cached_property
    def _parts_only(self) -> bool:
        """Return whether the template writes contents only as lists of parts, as some of models with images do."""
        asked: Message = {"role": "user", "content": QUESTION}
        with contextlib.suppress(DataError):
            if QUESTION in self._apply([asked]):
                return False
        with contextlib.suppress(DataError):
            return QUESTION in self._apply([_in_parts(asked)])
        return False

    def _apply(self, messages: Sequence[Message], tools: list[JsonObject] | None = None, generate: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=generate,
                tokenize=False,
                **self.arguments,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as problem:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template can't render messages of the roles {roles}: {problem}") from problem

    def written(
        self, messages: Sequence[Message], tools: list[dict[str, object]] | None
    ) -> tuple[list[Message], list[JsonObject] | None]:
        """Return the messages and tools for the template, with contents in parts unchanged."""
        if self.tools_as_text:
            messages, tools = as_text(messages, tools), None
        elif any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            messages = self._with_ids(messages) if self._names_by_id else messages
            messages = [self._with_arguments(message) for message in messages]
        return [self._with_thought(message) for message in messages], tools

    def question(self) -> str:
        """Return a rendered question, up to the beginning of the reply."""
        return self.apply([{"role": "user", "content": QUESTION}], generate=True)

    def as_sampled(self, calls: list[ToolCall], closing: str) -> str:
        """Return the text that a model samples for the calls; ``closing`` is the template's text after a reply."""
        asked: Message = {"role": "user", "content": QUESTION}
        written, _ = self.written([asked, {"role": "assistant", "content": "", "tool_calls": calls}], None)
        whole, question = self.apply(written), self.question()
        opening, end = self.marks or TAGS
        if not whole.startswith(question):  # the prompt opens thoughts, or writes empty ones
            question = question.rpartition(opening)[0] or question
        if not whole.startswith(question):
            return ""
        text = without_end(whole[len(question) :], closing)
        return text.rpartition(end)[2].strip()

    def _with_thought(self, message: Message) -> Message:
        if not (thought := message.get("reasoning_content")):
            return message
        match self._thoughts:
            case "text":
                return with_thought(message)
            case "thinking":
                return cast(Message, message | {"thinking": thought})
            case "part":
                parts = [{"type": "thinking", "thinking": thought}]
                if text := text_of(message["content"]):
                    parts.append({"type": "text", "text": text})
                return cast(Message, message | {"content": parts})
        return message

    @cached_property
    def _thoughts(self) -> Literal["field", "thinking", "part", "text"]:
        """The place of a thought: ``reasoning_content``, ``thinking``, a part of the content, or its text."""
        if HARMONY in self.text and "thinking" in self.text:
            return "thinking"
        if "reasoning_content" in self.text:
            return "field"
        return "part" if self.marks and self.marks[0] == "[THINK]" else "text"

    def _with_arguments(self, message: Message) -> Message:
        if not self._arguments_as_text or not (calls := message.get("tool_calls")):
            return message
        return cast(Message, message | {"tool_calls": [_in_json(call) for call in calls]})

    @cached_property
    def _arguments_as_text(self) -> bool:
        """Return whether the template takes the arguments of a call as JSON text only."""
        try:
            return "{'whetkey'" in self._sample(SAMPLES[0])
        except DataError:
            with contextlib.suppress(DataError):
                return bool(self._sample(_in_json(SAMPLES[0])))
        return False

    @cached_property
    def _names_by_id(self) -> bool:
        """Return whether the template writes the id of a call instead of its name (Kimi)."""
        with contextlib.suppress(DataError):
            written = self._sample(SAMPLES[0])
            return SAMPLES[0]["function"]["name"] not in written and SAMPLES[0]["id"] in written
        return False

    def _sample(self, call: ToolCall) -> str:
        asked: Message = {"role": "user", "content": QUESTION}
        return self.apply([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])

    def _with_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with ids that are made of the function's name and the call's number."""
        ids, written = dict[str, str](), list[Message]()
        for message in messages:
            if calls := message.get("tool_calls"):
                named = list[ToolCall]()
                for call in calls:
                    id, name = call.get("id", ""), call["function"]["name"]
                    number = len(ids) if (count := counted(id)) is None else count
                    ids[id] = id if id.startswith(f"functions.{name}:") else f"functions.{name}:{number}"
                    named.append({**call, "id": ids[id]})
                message = message | {"tool_calls": named}
            elif message["role"] == "tool" and (given := message.get("tool_call_id", "")) in ids:
                message = message | {"tool_call_id": ids[given]}
            written.append(message)
        return written


def without_end(text: str, closing: str) -> str:
    """Return the text of a reply without the end of its turn."""
    if closing and text.endswith(closing):
        return text.removesuffix(closing)
    end = next((end for end in CALL_ENDS if text.rstrip().endswith(end)), "")
    return text.rstrip().removesuffix(end) if end else text


def opened(chat: ChatTemplate) -> bool:
    """Return whether the prompt ends with the opening mark of a thought."""
    return chat.marks is not None and opens_thought(chat.question(), chat.marks)


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _in_json(call: ToolCall) -> Any:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
