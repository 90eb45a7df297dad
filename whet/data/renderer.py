"""Messages to tokens and back, by a model's chat template.

A conversation is rendered once, by appending: ``render_prompt`` gives the first tokens, the model samples a reply, and
``render_next`` gives only what comes after it. Tokens that were seen or sampled are never rendered again, because a
template may write earlier turns differently when later ones exist (dropped thinking, moved system prompts).
Knows no model and no environment.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from whet.errors import ConfigError, DataError
from whet.types import Message

PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)
_REPLY = "whetreplywhet"  # stands for a reply in conversations rendered only to see what surrounds it


class Renderer:
    """Renders for one tokenizer and chat template."""

    def __init__(
        self, tokenizer: Any, chat_template: str | None = None, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """``chat_template``: None for the tokenizer's own, ``"plain"`` for a simple built-in one, or Jinja text.
        ``arguments`` are passed to the template, e.g. ``{"enable_thinking": False}``.

        Raises ``ConfigError`` when there is no template or it can't be rendered by appending.
        """
        self.tokenizer = tokenizer
        self.template = PLAIN if chat_template == "plain" else chat_template or tokenizer.chat_template
        self.arguments = dict(arguments or {})
        if not self.template:
            raise ConfigError(
                "the tokenizer has no chat template: set chat_template to 'plain' or to the text of a template, "
                "or use an instruction-tuned model"
            )
        if self.template == PLAIN and not tokenizer.eos_token:
            raise ConfigError("chat_template 'plain' ends messages with the eos token, and this tokenizer has none")
        self._closing = self._check()
        closing = self._encode(self._closing)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self.end_of_turn: int | None = closing[0] if closing and closing[0] in special else None
        self.closing = tuple(closing) if self.end_of_turn is None else (self.end_of_turn,)  # what a reply ends with
        eos = tokenizer.eos_token_id
        stops = [token for token in (self.end_of_turn, eos) if token is not None]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))

    def render_prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Tokens up to where the assistant's reply begins."""
        return self._encode(self._render(messages, generate=True, tools=tools))

    def render_reply(
        self, messages: Sequence[Message], reply: Message, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """What a model has to sample after ``render_prompt(messages)`` to give ``reply``, with the end of its turn."""
        prompt = self._render(messages, generate=True, tools=tools)
        whole = self._render([*messages, reply], tools=tools)
        if whole.startswith(prompt) and whole.endswith(self._closing):
            text = whole[len(prompt) : len(whole) - len(self._closing)]
        else:  # the prompt opens what the template leaves out of finished replies, such as a <think> tag
            text = reply["content"]
        if self.end_of_turn is None:
            return self._encode(text + self._closing)
        return [*self._encode(text), self.end_of_turn]

    def render_whole(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """A finished conversation, as plain ``apply_chat_template`` gives it: what a reward model reads."""
        return self._encode(self._render(messages, tools=tools))

    def render_next(self, history: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens to append to ``history``, which ends in a sampled reply: the end of the assistant's turn, if the
        reply lacks it, the new messages, and the beginning of the next reply."""
        before, after = self._around([{"role": "user", "content": "x"}], messages, generate=True)
        head = self._encode(before + _REPLY)
        whole = self._encode(before + _REPLY + after)
        tokens = whole[len(head) :] if whole[: len(head)] == head else self._encode(after)
        if history and history[-1] in self.stop_token_ids and tokens[:1] == [self.end_of_turn]:
            return tokens[1:]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def parse_reply(self, tokens: Sequence[int]) -> Message:
        """The assistant's message in sampled tokens, without the token that ended it."""
        end = len(tokens)
        while end and tokens[end - 1] in self.stop_token_ids:
            end -= 1
        return {"role": "assistant", "content": self.decode(tokens[:end])}

    def _check(self) -> str:
        """What the template writes after a reply. Raises ``ConfigError`` unless appending is sound."""
        question: list[Message] = [{"role": "user", "content": "x"}]
        opening = self._render(question)
        before, closing = self._around(question, [])
        before_more, closing_more = self._around(question, [{"role": "user", "content": "y"}])
        if not before.startswith(opening) or not before_more.startswith(opening):
            raise ConfigError("the chat template writes a question differently once it is answered; give another one")
        if not closing_more.startswith(closing):
            raise ConfigError("the chat template ends a reply differently once the user goes on; give another one")
        return closing

    def _around(
        self, messages: Sequence[Message], following: Sequence[Message], generate: bool = False
    ) -> tuple[str, str]:
        """What the template writes before and after a reply that stands between the messages."""
        reply: Message = {"role": "assistant", "content": _REPLY}
        parts = self._render([*messages, reply, *following], generate=generate).split(_REPLY)
        if len(parts) != 2:
            raise ConfigError(f"the chat template writes a reply {len(parts) - 1} times instead of once")
        return parts[0], parts[1]

    def _render(
        self, messages: Sequence[Message], generate: bool = False, tools: list[dict[str, Any]] | None = None
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
        except TemplateError as problem:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template can't render messages of the roles {roles}: {problem}") from problem

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
