"""Messages to tokens and back, by a model's chat template.

A conversation is rendered once, by appending: ``render_prompt`` returns the first tokens, the model samples a reply,
and ``render_next`` returns only the tokens after it. Sampled and earlier tokens are never rendered again, because a
template may write earlier turns differently if later ones exist (dropped thinking, moved system prompts). Texts are
rendered hidden (``control_tokens.py``), so that none of them can write a control token.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from whet.base.errors import ConfigError, DataError
from whet.chat.call_formats import SAMPLE_TOOL, SAMPLES, CallFormat, format_of, reads_back
from whet.chat.control_tokens import NO_TEXT, ControlTokens
from whet.chat.length import longer_than
from whet.chat.parts import render_contents
from whet.chat.replies import ReplyFormat, ResponseTemplate
from whet.chat.thinking import CLOSE, OPEN, opens_thought, with_thought
from whet.chat.tools_as_text import as_text
from whet.config.nearest import did_you_mean
from whet.core.content import in_text, text_of
from whet.core.types import Message, ToolCall

PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)
_SET_HERE = {"messages", "tools", "add_generation_prompt"}
_EVERYWHERE = ("system", "user", "assistant")  # roles that every template supports
_OPENED = f"{OPEN}\n"
# A question and a reply in conversations that are rendered only to find the template's texts around them.
_QUESTION, _REPLY = "whetaskswhet", "whetreplywhet"


class Renderer:
    """Renders and parses messages for one tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        tools_as_text: bool = False,
    ) -> None:
        """``chat_template``: None for the tokenizer's own, ``"plain"`` for a simple built-in one, or Jinja text.
        ``arguments`` are passed to the template, e.g. ``{"enable_thinking": False}``. With ``tools_as_text``, the
        template gets tools, calls and results as plain text (``tools_as_text.py``).

        Raises ``ConfigError`` without a template, for an argument that the template doesn't read, and for a template
        that can't be rendered by appending.
        """
        self.tokenizer = tokenizer
        self.template = PLAIN if chat_template == "plain" else chat_template or tokenizer.chat_template
        self.arguments, self.tools_as_text = dict(arguments or {}), tools_as_text
        if not self.template:
            raise ConfigError(
                "the tokenizer has no chat template: set chat_template to 'plain' or to the text of a template, "
                "or use an instruction-tuned model"
            )
        variables = set(re.findall(r"[^\W\d]\w*", self.template)) - _SET_HERE
        for name in sorted(self.arguments.keys() - variables):
            what = "is set by whet" if name in _SET_HERE else "is not read by the chat template"
            raise ConfigError(f"template_arguments: {name!r} {what}.{did_you_mean(name, variables)}")
        if self.template == PLAIN and not tokenizer.eos_token:
            raise ConfigError("chat_template 'plain' ends messages with the eos token, and this tokenizer has none")
        self._control = ControlTokens(tokenizer, self.template, self._marks())
        self._closing = self._check()
        closing = self._control.encode(self._closing)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self.end_of_turn: int | None = closing[0] if closing and closing[0] in special else None
        self.closing = tuple(closing) if self.end_of_turn is None else (self.end_of_turn,)  # the last tokens of a reply
        eos = tokenizer.eos_token_id
        stops = [token for token in (self.end_of_turn, eos) if token is not None]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        template = tokenizer.response_template if chat_template is None and not tools_as_text else None
        self.replies = ResponseTemplate(template, self._question()) if template else self._reply_format()

    def render_prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the tokens up to the beginning of the assistant's reply."""
        return self._control.encode(self._render(messages, generate=True, tools=tools))

    def render_reply(
        self, messages: Sequence[Message], reply: Message, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the tokens that a model samples after ``render_prompt(messages)`` for ``reply``, with the end of its
        turn."""
        show = self._control.show
        prompt = show(self._render(messages, generate=True, tools=tools))
        whole = self._render([*messages, reply], tools=tools)
        if show(whole).startswith(prompt) and show(whole).endswith(self._closing):
            text = whole[len(prompt) : len(whole) - len(self._closing)]
        else:  # the prompt ends with a text that the template omits from finished replies, such as a <think> tag
            shown = with_thought(self._written([reply], None)[0][0])
            if shown.get("tool_calls"):
                raise DataError("the chat template begins replies in a way that doesn't allow tool calls")
            content, hide = text_of(shown["content"]), self._control.hide
            if opens_thought(self._question()):
                thought, content = content.split(CLOSE, 1) if CLOSE in content else ("\n", f"\n\n{content}")
                text = f"{hide(thought.removeprefix(_OPENED))}{CLOSE}{hide(content)}"
            else:
                text = hide(content)
        if self.end_of_turn is None:
            return self._control.encode(text + self._closing)
        return [*self._control.encode(text), self.end_of_turn]

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text, none of them a control token."""
        return self._control.encode(self._control.hide(text))

    def render_whole(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the tokens of a finished conversation, as ``apply_chat_template`` renders it, for a reward model."""
        return self._control.encode(self._render(messages, tools=tools))

    def render_next(self, history: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens to append to ``history``, which ends with a sampled reply: the end of the assistant's turn,
        if the reply lacks it, the new messages, and the beginning of the next reply."""
        before, after = self._around([{"role": "user", "content": "x"}], messages, generate=True)
        head = self._control.encode(before + _REPLY)
        whole = self._control.encode(before + _REPLY + after)
        tokens = whole[len(head) :] if whole[: len(head)] == head else self._control.encode(after)
        if history and history[-1] in self.stop_token_ids and tokens[:1] == [self.end_of_turn]:
            return tokens[1:]
        return tokens

    def longer_than(self, limit: int, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> bool:
        """Return whether a conversation certainly has more than ``limit`` tokens, in a time that doesn't grow with
        it."""
        return longer_than(
            limit, messages, tools, lambda text: len(self.tokenizer.encode(text, add_special_tokens=False))
        )

    def left_out(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> str | None:
        """Return the part of a conversation that the template omits: the tools, the tool calls of a reply, or a message
        of a role other than system, user and assistant. None if it omits nothing."""
        messages, tools = self._written(in_text(messages), tools)
        if not tools and all(message["role"] in _EVERYWHERE and not message.get("tool_calls") for message in messages):
            return None
        whole = self._apply(messages, tools)
        if tools and self._apply(messages) == whole:
            return "the tools"
        for index, message in enumerate(messages):
            without: list[Message] = [*messages]
            what = "the tool calls of a reply"
            if message.get("tool_calls"):
                without[index] = {"role": "assistant", "content": message["content"]}
            elif message["role"] not in _EVERYWHERE:
                without[index] = {**message, "content": text_of(message["content"]) + "x"}
                what = f"a message of the role {message['role']!r}"
            else:
                continue
            with contextlib.suppress(DataError):  # the changed conversation can't be rendered, so the part is needed
                if self._apply(without, tools) == whole:
                    return what
        return None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, including special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def parse_reply(self, tokens: Sequence[int], tools: list[dict[str, Any]] | None = None) -> Message:
        """Return the assistant's message of sampled tokens, without the end of its turn. Code points that are not
        characters of Unicode are replaced by U+FFFD."""
        end = len(tokens)
        while end and tokens[end - 1] in self.stop_token_ids:
            end -= 1
        return self.replies.parse(NO_TEXT.sub("\ufffd", self.decode(tokens[:end])), tools)

    def check_tools(self) -> None:
        """Raise ``ConfigError`` unless the template writes tools, and calls in a format that whet can parse."""
        if self._tool_problem is not None:
            advice = "set tools_as_text: true, or give a chat_template that writes them"
            raise ConfigError(f"the chat template {self._tool_problem}; {advice}")

    @cached_property
    def _tool_problem(self) -> str | None:
        """Return the reason why the template can't be used with tools; None if it can."""
        if self.left_out([{"role": "user", "content": _QUESTION}], [SAMPLE_TOOL]):
            return "leaves out the tools"
        unsupported = "writes tool calls in a format that whet can't read"
        if isinstance(self.replies, ReplyFormat):
            return unsupported if self.replies.calls is None else None
        try:
            written = self._as_sampled(SAMPLES[:1])
        except DataError:
            return unsupported
        calls = self.replies.parse(written).get("tool_calls", [])
        return None if [call["function"] for call in calls] == [SAMPLES[0]["function"]] else unsupported

    def _question(self) -> str:
        """Return a rendered question, up to the beginning of the reply."""
        return self._apply([{"role": "user", "content": _QUESTION}], generate=True)

    def _reply_format(self) -> ReplyFormat:
        return ReplyFormat(self._call_format(), CLOSE in self.template, opens_thought(self._question()))

    def _call_format(self) -> CallFormat | None:
        """Return the template's format of calls; None for a format that can't be parsed."""
        try:
            format = format_of(self._as_sampled(SAMPLES[:1]))
        except DataError:  # a template that doesn't support calls
            return None
        with contextlib.suppress(DataError):  # a template that allows only one call in a reply
            both, closing = self._as_sampled(SAMPLES), self._closing.strip()
            several_turns = bool(closing) and closing in both
            if format is not None and not several_turns and not reads_back(format, both):
                return None
        return format

    def _as_sampled(self, calls: list[ToolCall]) -> str:
        """Return the text that a model samples for the calls, by the template."""
        asked: Message = {"role": "user", "content": _QUESTION}
        written, _ = self._written([asked, {"role": "assistant", "content": "", "tool_calls": calls}], None)
        whole, question = self._apply(written), self._question()
        if not whole.startswith(question):  # the prompt opens thoughts, or writes empty ones
            question = question.rpartition(OPEN)[0] or question
        if not whole.startswith(question):
            return ""
        return whole[len(question) :].removesuffix(self._closing).rpartition(CLOSE)[2].strip()

    def _written(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Return the messages and tools for the template, with contents in parts unchanged."""
        if self.tools_as_text:
            messages, tools = as_text(messages, tools), None
        if "reasoning_content" not in self.template:
            messages = [with_thought(message) for message in messages]
        return list(messages), tools

    def _check(self) -> str:
        """Return the template's text after a reply. Raises ``ConfigError`` unless the template allows appending."""
        question: list[Message] = [{"role": "user", "content": "x"}]
        opening = self._render(question)
        before, closing = self._around(question, [])
        before_more, closing_more = self._around(question, [{"role": "user", "content": "y"}])
        if not before.startswith(opening) or not before_more.startswith(opening):
            raise ConfigError(
                "the chat template writes a question differently once it was answered, so that nothing can be appended "
                "to a conversation; set another chat_template"
            )
        if not closing_more.startswith(closing):
            raise ConfigError(
                "the chat template ends a reply differently before another message, so that nothing can be appended "
                "to a conversation; set another chat_template"
            )
        return closing

    def _around(
        self, messages: Sequence[Message], following: Sequence[Message], generate: bool = False
    ) -> tuple[str, str]:
        """Return the hidden texts before and after a reply between the messages."""
        text = _REPLY
        while text in repr((in_text(messages), in_text(following))):
            text += _REPLY
        reply: Message = {"role": "assistant", "content": text}
        hidden = self._render([*messages, reply, *following], generate=generate)
        before, *after = self._control.show(hidden).split(text)
        if len(after) != 1:
            raise ConfigError(f"the chat template writes a reply {len(after)} times instead of once")
        return hidden[: len(before)], hidden[len(hidden) - len(after[0]) :]

    def _marks(self) -> set[str]:
        """Return the added tokens with which the template marks turns: before a question, before and after a reply."""
        asked: Message = {"role": "user", "content": _QUESTION}
        reply: Message = {"role": "assistant", "content": _REPLY}
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        first, _, rest = self._apply([asked, reply, asked]).partition(_QUESTION)
        opening, _, closing = rest.rpartition(_QUESTION)[0].partition(_REPLY)
        marks_in = re.compile("|".join(map(re.escape, added)) or "(?!)").findall
        return {*marks_in(first)[-1:], *marks_in(opening)[:1], *marks_in(closing)}

    def _render(
        self, messages: Sequence[Message], generate: bool = False, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Return the hidden rendering (see ``control_tokens.py``)."""

        def apply(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
            return self._apply(messages, tools, generate)

        def render(messages: Sequence[Message]) -> str:
            return self._control.render(apply, *self._written(messages, tools))

        return render_contents(self._control, render, messages)

    def _apply(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, generate: bool = False
    ) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.template,
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
