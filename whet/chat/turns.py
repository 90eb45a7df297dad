"""The beginnings and ends of turns in a chat template, from the renderings of small conversations.

Contents in parts are passed to a chat template as parts if it writes their texts or they have images, and otherwise as
text."""

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import cached_property

from whet.base.errors import ConfigError, DataError
from whet.chat.chat_template import CALL_ENDS, QUESTION, ChatTemplate, without_end
from whet.chat.control_tokens import ControlTokens
from whet.core.content import image_urls, in_text, words_of
from whet.core.types import Message, ToolCall

_REPLY = "whetreplywhet"  # a reply in conversations that are rendered only to find the template's texts around it


class Turns:
    """Renders conversations hidden (``control_tokens.py``), and finds the ends of turns. Raises ``ConfigError`` unless
    the template allows appending."""

    def __init__(self, chat: ChatTemplate, images: bool = False) -> None:
        """``images``: messages may have images, which the template marks."""
        tokenizer = chat.tokenizer
        self.chat, self.images = chat, images
        self.control = ControlTokens(tokenizer, chat.text, self._marks())
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        question: list[Message] = [{"role": "user", "content": "x"}]
        opening = self.render(question)
        before, self.closing = self._around(question, [])
        before_more, following = self._around(question, [{"role": "user", "content": "y"}])
        if not before.startswith(opening) or not before_more.startswith(opening):
            raise ConfigError(
                "the chat template writes a question differently once it was answered, so that nothing can be appended "
                "to a conversation; set another chat_template"
            )
        closing, after = self.control.encode(self.closing), self.control.encode(following)
        another = len(closing) == 1 and closing[0] in special and after[0] in special  # gpt-oss: <|return|>, <|end|>
        if not following.startswith(self.closing) and not another:
            raise ConfigError(
                "the chat template ends a reply differently before another message, so that nothing can be appended "
                "to a conversation; set another chat_template"
            )
        self.ends_with_next = not closing and bool(after) and after[0] in special  # GLM: the next role is the end
        first = after if self.ends_with_next else closing
        self.end: int | None = first[0] if first and first[0] in special else None
        # Tokens that only end a turn: if a reply has ended otherwise, they are left out before the next message.
        self.closers = set() if self.ends_with_next else {self.end, *(after[:1] if another else ())} - {None}
        self.closers |= set(self._call_ends) - {self._id("<|tool_response>")}  # of Gemma: it begins the result, too

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The tokens after which sampling stops: the ends of turns, and the end of the text."""
        ends = [self.end, *self._call_ends, self.chat.tokenizer.eos_token_id]
        if self.ends_with_next:
            ends.append(self.call_end)
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    @cached_property
    def call_end(self) -> int | None:
        """The token with which a reply with calls ends its turn."""
        result: Message = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "x"}
        try:
            following = self.control.encode(self.after([result])[1])
        except DataError:  # a template without results
            return self.end
        return following[0] if following and following[0] in {*self._call_ends, *self._added} else self.end

    def render(
        self, messages: Sequence[Message], generate: bool = False, tools: list[dict[str, object]] | None = None
    ) -> str:
        """Return the hidden rendering of a conversation."""

        def apply(messages: Sequence[Message], tools: list[dict[str, object]] | None) -> str:
            return self.chat.apply(messages, tools, generate)

        def render(messages: Sequence[Message]) -> str:
            return self.control.render(apply, *self.chat.written(messages, tools))

        return render_contents(self.control, render, messages, self.images)

    def after(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the hidden text up to the end of some reply, and the text that follows it: the end of the turn, the
        messages, and the beginning of the next reply. Results follow a reply with their calls, because some templates
        write them only there."""
        asked: list[Message] = [{"role": "user", "content": "x"}]
        text = self._unused(messages)
        if calls := _calls(messages, text):
            reply: Message = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                alone, whole = self.render([*asked, reply]), self.render([*asked, reply, *messages], generate=True)
            except DataError:  # a template that allows one call in a reply
                return self._after_text(asked, messages)
            (_, end, written), (_, rest, _) = (self._parted(hidden, text) for hidden in (alone, whole))
            end = end[: len(without_end(self.control.show(end), self.control.show(self.closing)))]
            if written and self.control.show(rest).startswith(self.control.show(end)):
                start = len(whole) - len(rest) + len(end)
                return whole[:start], whole[start:]
        return self._after_text(asked, messages)

    def _after_text(self, asked: Sequence[Message], messages: Sequence[Message]) -> tuple[str, str]:
        before, after = self._around(asked, messages, generate=True)
        return before + _REPLY, after

    def _parted(self, hidden: str, text: str) -> tuple[str, str, bool]:
        """Return the hidden texts before and after the last occurrence of a text, and whether there is one."""
        before, middle, after = self.control.show(hidden).rpartition(text)
        return hidden[: len(before)], hidden[len(hidden) - len(after) :], bool(middle)

    def _around(
        self, messages: Sequence[Message], following: Sequence[Message], generate: bool = False
    ) -> tuple[str, str]:
        """Return the hidden texts before and after a reply between the messages."""
        text = self._unused([*messages, *following])
        reply: Message = {"role": "assistant", "content": text}
        hidden = self.render([*messages, reply, *following], generate=generate)
        count = self.control.show(hidden).count(text)
        if count != 1:
            raise ConfigError(f"the chat template writes a reply {count} times instead of once")
        before, after, _ = self._parted(hidden, text)
        return before, after

    @staticmethod
    def _unused(messages: Sequence[Message]) -> str:
        """Return a text that the messages don't contain."""
        text = _REPLY
        while any(text in repr({**message, "content": words_of(message["content"])}) for message in messages):
            text += _REPLY
        return text

    @cached_property
    def _call_ends(self) -> list[int]:
        """The tokens of the template that end turns with calls."""
        ends = [self._id(end) for end in CALL_ENDS if end in self.chat.text]
        return [end for end in ends if end is not None]

    @cached_property
    def _added(self) -> set[int]:
        """The token that begins a result, where it also ends the reply."""
        return set(self.chat.tokenizer.added_tokens_decoder) if self.ends_with_next else set()

    def _id(self, spelling: str) -> int | None:
        added = self.chat.tokenizer.added_tokens_decoder.items()
        return next((id for id, token in added if token.content == spelling), None)

    def _marks(self) -> set[str]:
        """Return the added tokens with which the template marks turns: before a question, before and after a reply."""
        asked: Message = {"role": "user", "content": QUESTION}
        reply: Message = {"role": "assistant", "content": _REPLY}
        added = [token.content for token in self.chat.tokenizer.added_tokens_decoder.values()]
        first, _, rest = self.chat.apply([asked, reply, asked]).partition(QUESTION)
        opening, _, closing = rest.rpartition(QUESTION)[0].partition(_REPLY)
        marks_in = re.compile("|".join(map(re.escape, added)) or "(?!)").findall
        return {*marks_in(first)[-1:], *marks_in(opening)[:1], *marks_in(closing)}


def _calls(messages: Sequence[Message], text: str) -> list[ToolCall]:
    """Return the calls whose results the messages begin with, the last with the text as an argument."""
    calls = list[ToolCall]()
    for message in messages:
        if message["role"] != "tool":
            break
        id, name = message.get("tool_call_id", ""), message.get("name", "tool")
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": {}}})
    if calls:
        calls[-1]["function"]["arguments"] = {"text": text}
    return calls


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
