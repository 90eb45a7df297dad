"""Messages to tokens and back, by a model's chat template.

A conversation is rendered once, by appending: ``render_prompt`` returns the first tokens, the model samples a reply,
and ``render_next`` returns only the tokens after it. Sampled and earlier tokens are never rendered again, because a
template may write earlier turns differently if later ones exist (dropped thinking, moved system prompts). Texts are
rendered hidden (``control_tokens.py``), so that none of them can write a control token.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

from whet.base.errors import ConfigError, DataError
from whet.chat.call_formats import SAMPLE_TOOL, SAMPLES, CallFormat, format_of, reads_back
from whet.chat.chat_template import HARMONY, QUESTION, ChatTemplate, opened, without_end
from whet.chat.control_tokens import NO_TEXT, encoded
from whet.chat.harmony import HarmonyReplies
from whet.chat.length import longer_than
from whet.chat.omissions import left_out
from whet.chat.replies import Replies, ReplyFormat, ResponseTemplate
from whet.chat.thinking import TAGS, with_thought
from whet.chat.token_bytes import token_bytes
from whet.chat.turns import Turns
from whet.config.issues import did_you_mean
from whet.core.content import image_urls, in_text, text_of
from whet.core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)
_SET_HERE = {"messages", "tools", "add_generation_prompt"}
_RECENT = 64  # prompts whose tokens are kept


class ImageTokens(Protocol):
    """The tokens of images in a prompt; see ``whet.models.image_processor``."""

    mark: int
    """The token that the chat template writes for an image."""

    def tokens(self, url: str) -> Sequence[int]:
        """Return the tokens that stand for the image with this data URL."""
        ...

    def marked(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens with the tokenizer's token of an image instead of each placeholder."""
        ...


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The beginning of a conversation, which equals another if their texts are equal."""

    text: str
    messages: Sequence[Message] = field(compare=False)
    tools: list[dict[str, object]] | None = field(compare=False)


class Renderer:
    """Renders and parses messages for one tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template: str | None = None,
        arguments: Mapping[str, object] | None = None,
        tools_as_text: bool = False,
        images: ImageTokens | None = None,
    ) -> None:
        """``chat_template``: None for the tokenizer's own, ``"plain"`` for a simple built-in one, or Jinja text.
        ``arguments`` are passed to the template, e.g. ``{"enable_thinking": False}``. With ``tools_as_text``, the
        template gets tools, calls and results as plain text (``tools_as_text.py``). ``images`` gives the tokens of
        images; without it messages with images are refused.

        Raises ``ConfigError`` without a template, for an argument that the template doesn't read, and for a template
        that can't be rendered by appending.
        """
        self.tokenizer = tokenizer
        self.template = PLAIN if chat_template == "plain" else chat_template or tokenizer.chat_template
        if not self.template:
            raise ConfigError(
                "the tokenizer has no chat template: set chat_template to 'plain' or to the text of a template, "
                "or use an instruction-tuned model"
            )
        variables = set(re.findall(r"[^\W\d]\w*", self.template)) - _SET_HERE
        for name in sorted((arguments or {}).keys() - variables):
            what = "is set by whet" if name in _SET_HERE else "is not read by the chat template"
            raise ConfigError(f"template_arguments: {name!r} {what}.{did_you_mean(name, variables)}")
        if self.template == PLAIN and not tokenizer.eos_token:
            raise ConfigError("chat_template 'plain' ends messages with the eos token, and this tokenizer has none")
        self.chat = ChatTemplate(tokenizer, self.template, arguments or {}, tools_as_text)
        self.images = images
        # All episodes of a group begin with the same prompt.
        self._recent = lru_cache(_RECENT)(lambda prompt: self._prompt(prompt.messages, prompt.tools))
        self.bytes_of = cache(token_bytes(tokenizer))  # of one token; the tokenizer takes 40 us for it
        self._turns = Turns(self.chat, images is not None)
        self._control = self._turns.control
        self.end_of_turn = self._turns.end
        closing = self._control.encode(self._turns.closing)
        self.closing = tuple(closing) if self.end_of_turn is None else (self.end_of_turn,)  # the last tokens of a reply
        self.stop_token_ids = self._turns.stops
        template = tokenizer.response_template if chat_template is None and not tools_as_text else None
        self.replies: Replies = (
            ResponseTemplate(template, self.chat.question()) if template else self._reply_format(tools_as_text)
        )

    def render_prompt(self, messages: Sequence[Message], tools: list[dict[str, object]] | None = None) -> list[int]:
        """Return the tokens up to the beginning of the assistant's reply."""
        if image_urls(messages):
            return self._with_images(self._prompt(messages, tools), messages)
        return list(self._recent(_Prompt(repr((messages, tools)), messages, tools)))

    def render_reply(
        self, messages: Sequence[Message], reply: Message, tools: list[dict[str, object]] | None = None
    ) -> list[int]:
        """Return the tokens that a model samples after ``render_prompt(messages)`` for ``reply``, with the end of its
        turn. Raises ``DataError`` if the template can't write the reply."""
        text = self._reply_text(messages, reply, tools)
        calls, thought = reply.get("tool_calls", []), reply.get("reasoning_content", "")
        shown = self._control.show(text)
        count = len(self.replies.parse(shown, tools).get("tool_calls", calls)) if calls else 0
        if count < len(calls):
            raise DataError(f"the chat template writes {count} of the {len(calls)} calls of a reply")
        if thought.strip() and thought.strip() not in shown:
            raise DataError("the chat template leaves out the thought of a reply")
        if self.end_of_turn is None:
            return self._control.encode(text + self._turns.closing)
        end = self._turns.call_end if calls else self.end_of_turn
        return [*self._control.encode(text), self.end_of_turn if end is None else end]

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text, none of them a control token."""
        return self._control.encode(self._control.hide(text))

    def render_whole(self, messages: Sequence[Message], tools: list[dict[str, object]] | None = None) -> list[int]:
        """Return the tokens of a finished conversation, as ``apply_chat_template`` renders it, for a reward model."""
        return self._with_images(self._control.encode(self._turns.render(messages, tools=tools)), messages)

    def render_next(self, history: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens to append to ``history``, which ends with a sampled reply: the end of the assistant's turn,
        if the reply lacks it, the new messages, and the beginning of the next reply."""
        before, after = self._turns.after(messages)
        before = self._control.after_last(before)  # tokens don't reach across a control token
        head, whole = self._control.encode(before), self._control.encode(before + after)
        tokens = whole[len(head) :] if whole[: len(head)] == head else self._control.encode(after)
        tokens = self._with_images(tokens, messages)
        ended = bool(history) and history[-1] in self.stop_token_ids
        if ended and tokens and (tokens[0] == history[-1] or tokens[0] in self._turns.closers):
            return tokens[1:]
        return tokens

    def longer_than(
        self, limit: int, messages: Sequence[Message], tools: list[dict[str, object]] | None = None
    ) -> bool:
        """Return whether a conversation certainly has more than ``limit`` tokens, in a time that doesn't grow with
        it."""
        return longer_than(limit, messages, tools, lambda text: len(encoded(self.tokenizer, text)))

    def left_out(self, messages: Sequence[Message], tools: list[dict[str, object]] | None = None) -> str | None:
        """Return the part of a conversation that the template omits (``omissions.py``); None if it omits nothing."""
        return left_out(self.chat, messages, tools)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, including special tokens."""
        shown = list(tokens) if self.images is None else self.images.marked(tokens)
        return self.tokenizer.decode(shown, skip_special_tokens=False)

    def text_of(self, token: int) -> str:
        """Return the text of one token; parts of characters become replacement characters."""
        return self.bytes_of(token).decode(errors="replace")

    def parse_reply(self, tokens: Sequence[int], tools: list[dict[str, object]] | None = None) -> Message:
        """Return the assistant's message of sampled tokens, without the end of its turn. Code points that are not
        characters of Unicode are replaced by U+FFFD."""
        end = len(tokens)
        while end and tokens[end - 1] in self.stop_token_ids:
            end -= 1
        return self.replies.parse(NO_TEXT.sub("\ufffd", self.decode(tokens[:end])), tools)

    @property
    def writes_tools(self) -> bool:
        """Return whether ``check_tools`` raises nothing."""
        return self._tool_problem is None

    def check_tools(self) -> None:
        """Raise ``ConfigError`` unless the template writes tools, and calls in a format that whet can parse."""
        if self._tool_problem is not None:
            advice = "set tools_as_text: true, or give a chat_template that writes them"
            raise ConfigError(f"the chat template {self._tool_problem}; {advice}")

    def check_thinking(self) -> None:
        """Raise ``ConfigError`` if the template writes thoughts otherwise than between ``<think>`` and ``</think>``."""
        if isinstance(self.replies, HarmonyReplies) or self.chat.marks not in (None, TAGS):
            marks = " and ".join(self.chat.marks or ("channels",))
            raise ConfigError(
                f"sampling.thinking and sampling.thinking_budget need thoughts between <think> and </think>; this chat "
                f"template writes them with {marks}. Leave them unset"
            )

    @cached_property
    def _tool_problem(self) -> str | None:
        """Return the reason why the template can't be used with tools; None if it can."""
        if self.left_out([{"role": "user", "content": QUESTION}], [SAMPLE_TOOL]):
            return "leaves out the tools"
        unsupported = "writes tool calls in a format that whet can't read"
        if isinstance(self.replies, ReplyFormat):
            return unsupported if self.replies.calls is None else None
        try:
            written = self._as_sampled(1)
        except DataError:
            return unsupported
        calls = self.replies.parse(written).get("tool_calls", [])
        return None if [call["function"] for call in calls] == [SAMPLES[0]["function"]] else unsupported

    def _prompt(self, messages: Sequence[Message], tools: list[dict[str, object]] | None) -> list[int]:
        return self._control.encode(self._turns.render(messages, generate=True, tools=tools))

    def _reply_format(self, tools_as_text: bool) -> Replies:
        if HARMONY in self.template and not tools_as_text:
            return HarmonyReplies()
        return ReplyFormat(self._call_format(), self.chat.marks, opened(self.chat))

    def _call_format(self) -> CallFormat | None:
        """Return the template's format of calls; None for a format that can't be parsed."""
        try:
            format = format_of(self._as_sampled(1))
        except DataError:  # a template that doesn't support calls
            return None
        with contextlib.suppress(DataError):  # a template that allows only one call in a reply
            both, closing = self._as_sampled(2), self._control.show(self._turns.closing).strip()
            several_turns = bool(closing) and closing in both
            if format is not None and not several_turns and not reads_back(format, both):
                return None
        return format

    def _with_images(self, tokens: list[int], messages: Sequence[Message]) -> list[int]:
        return with_images(tokens, messages, self.images)

    def _as_sampled(self, number: int) -> str:
        """Return the text that a model samples for the first ``SAMPLES``."""
        return self.chat.as_sampled(SAMPLES[:number], self._control.show(self._turns.closing))

    def _reply_text(self, messages: Sequence[Message], reply: Message, tools: list[dict[str, object]] | None) -> str:
        """Return the hidden text of a reply, without the end of its turn."""
        show = self._control.show
        prompt = show(self._turns.render(messages, generate=True, tools=tools))
        whole = self._turns.render([*messages, reply], tools=tools)
        whole = whole[: len(without_end(show(whole), show(self._turns.closing)))]
        opening, closing = self.chat.marks or TAGS
        thought = reply.get("reasoning_content", "").strip("\n")
        if show(whole).startswith(prompt):
            text = whole[len(prompt) :]
            empty = re.match(rf"\s*{re.escape(opening)}(\s*){re.escape(closing)}", show(text))
            if empty and thought:  # a template that drops the thoughts of every reply without calls (Kimi K2)
                text = text[: empty.start(1)] + self._control.hide(thought) + text[empty.end(1) :]
            return text
        # The prompt ends with a text that the template omits from finished replies, such as a <think> tag.
        written = with_thought(self.chat.written([reply], None)[0][0])
        content = self._control.hide(text_of(written["content"]))
        if reply.get("tool_calls"):
            beginning = prompt.rpartition(opening)[0]
            if not beginning or not show(whole).startswith(beginning):
                raise DataError("the chat template begins replies in a way that doesn't allow tool calls")
            content = whole[len(beginning) :]
        if not opened(self.chat):
            return content
        end = show(content).find(closing)
        if end < 0:
            begun = f"{self._control.hide(thought)}\n" if thought else "\n"
            return f"{begun}{closing}\n\n{content}"
        start = len(f"{opening}\n") if show(content).startswith(f"{opening}\n") else 0
        return f"{content[start:end]}{closing}{content[end + len(closing) :]}"


def with_images(tokens: list[int], messages: Sequence[Message], images: ImageTokens | None) -> list[int]:
    """Return the tokens of rendered messages with the tokens of each image instead of the template's mark for it.
    Raises ``DataError`` if the template writes another number of marks."""
    if images is None or not (urls := image_urls(messages)):
        return tokens
    mark, marks = images.mark, tokens.count(images.mark)
    if marks != len(urls):
        raise DataError(f"the chat template writes {marks} marks of images for {len(urls)} images")
    following, written = iter(urls), list[int]()
    for token in tokens:
        written += images.tokens(next(following)) if token == mark else [token]
    return written


def check_images(renderer: Renderer | None, messages: Sequence[Message], where: str) -> None:
    """Raise ``DataError`` if the messages have images and the model reads none; ``where`` says what the messages belong
    to, as in ``" of task 17"``. ``renderer``: None for a model behind an API, which answers for itself."""
    if renderer is not None and renderer.images is None:
        in_text(messages, where)
