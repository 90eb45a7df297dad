"""A model behind an OpenAI-compatible endpoint that is evaluated: episodes send it messages instead of tokens."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from whet.base.addresses import checked_address, hidden, key_in
from whet.base.errors import ConfigError, GeneratorError
from whet.base.extras import extra
from whet.base.strict_json import JsonObject
from whet.chat.calls import checked_arguments
from whet.core.content import Part, content_of, image_urls, text_of
from whet.core.types import Message, Span
from whet.endpoint.request import incoming, outgoing
from whet.engines.base import Completion
from whet.rollouts.blend import Blend
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import LimitReached, Recording, Reply, Schemas, Session
from whet.rollouts.watched import Watch
from whet.run.evaluation import EvaluationSet

if TYPE_CHECKING:
    import httpx

_DEADLINE, _RETRIES, _MOST_BYTES, _MOST_TOKENS = 600.0, 5, 50_000_000, 10_000_000
_KEY = "OPENAI_API_KEY"  # the environment variable of most clients
# Sampling that leaves the model's probabilities as they are. Without these settings, servers such as vLLM's apply what
# the model's ``generation_config.json`` says; OpenAI's API and others refuse some of them.
_UNCHANGED: JsonObject = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_REPEAT = (408, 409, 425, 429, 500, 502, 503, 504)
_SHORTER = "; if the context is too short for the prompt and its answer, lower sampling.max_new_tokens"


@dataclass(slots=True)
class RemoteReply:
    """A reply of the endpoint."""

    message: Message
    tokens: int  # as the endpoint counts them, 0 if it does not
    cut: bool  # by the limit of tokens


class RemoteModel:
    """A client of one model. It must be created in the event loop that uses it."""

    def __init__(
        self, url: str, model: str, key: str | None, transport: "httpx.AsyncBaseTransport | None" = None
    ) -> None:
        """``transport`` replaces the network in tests."""
        with extra("tasks", "a model behind an endpoint"):
            from whet.fetch.http import HttpClient
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.url, self.model = url, model
        self._http = HttpClient(_DEADLINE, _MOST_BYTES, headers, transport)
        self._unknown = set[str]()  # settings of ``_UNCHANGED`` that the endpoint refuses

    async def say(
        self, messages: Sequence[Message], tools: Schemas | None, settings: dict[str, object], name: str, first: bool
    ) -> RemoteReply:
        """Return the reply to a conversation. Raises ``LimitReached`` if the conversation has become too long for the
        model, which is an error at the ``first`` reply, ``ConfigError`` for a request that is refused and
        ``GeneratorError`` for an endpoint that gives no answer after five repeats."""
        from whet.fetch.http import UnansweredError, retried

        body: JsonObject = {"model": self.model, "messages": [_sent(message) for message in messages], **settings}
        if tools:
            body["tools"] = tools

        async def attempt(number: int) -> RemoteReply:
            unchanged = {name: value for name, value in _UNCHANGED.items() if name not in self._unknown | body.keys()}
            answer = await self._http.post(f"{self.url}/chat/completions", unchanged | body)
            refused = {name for name in unchanged if answer.status in (400, 422) and name in answer.text}
            if refused:
                self._unknown |= refused
                return await attempt(number)
            if answer.status in _REPEAT:
                raise UnansweredError(f"HTTP {answer.status}: {answer.text[:200]}", answer.wait)
            if answer.status != 200:
                full = "context" in answer.text and answer.status == 400
                if full and not first:
                    raise LimitReached("tokens")
                why = f"{self.url} refuses the request with HTTP {answer.status}: {answer.text[:300]}"
                raise ConfigError(why + _SHORTER * full)
            try:
                values = answer.json()
                choice, usage = values["choices"][0], values.get("usage") or {}
                tokens = int(usage.get("completion_tokens") or 0)
                if not 0 <= tokens <= _MOST_TOKENS:
                    raise ValueError(f"{tokens} completion_tokens")
                return RemoteReply(_received(choice["message"]), tokens, choice.get("finish_reason") == "length")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}, in the answer {answer.text[:200]!r}"
                raise UnansweredError(reason) from None

        try:
            return await retried(attempt, _RETRIES, "endpoint", name)
        except UnansweredError as error:
            raise GeneratorError(f"{self.url} gave no reply in {_RETRIES + 1} attempts: {error}") from None

    async def close(self) -> None:
        await self._http.close()


def check_for_endpoint(sampling: Sampling, sets: Mapping[str, EvaluationSet]) -> None:
    """Raise ``ConfigError`` for settings of sampling, also of an environment of a blend, that only a model which
    samples tokens can follow."""
    blends = [each.data.of for each in sets.values() if isinstance(each.data, Blend)]
    parts = {f"data.of.{name}.": part.sampling.under(sampling) for of in blends for name, part in of.items()}
    for where, settings in {"": sampling, **parts}.items():
        if settings.controls_thinking:
            names = [f"{where}sampling.{name}" for name in ("thinking", "thinking_budget")]
            raise ConfigError(
                f"{' and '.join(names)} write into the model's reply, which an endpoint doesn't allow; leave them out "
                f"({' '.join(f'{name}=null' for name in names)}), and set the endpoint's own"
            )


def split_address(address: str) -> tuple[str, str]:
    """Return (URL, model) of ``URL#MODEL``. Raises ``ConfigError``, whose text has no password."""
    url, _, model = address.partition("#")
    try:
        return checked_address(url).rstrip("/"), model
    except ValueError as error:
        # A password with a '#' was cut there, and its beginning taken for a port.
        why = f"{hidden(address)!r} is not the address of a server" if "@" in model else str(error)
        raise ConfigError(why) from None


def parse_address(address: str, key_variable: str | None = None) -> tuple[str, str, str | None]:
    """Return (URL, model, key) of ``URL#MODEL``; without a model the only one that the endpoint lists.
    ``key_variable``: the environment variable that holds the key; None: ``OPENAI_API_KEY``, if it is set. Raises
    ``ConfigError``."""
    url, model = split_address(address)
    key = key_in(key_variable or (_KEY if os.environ.get(_KEY) else None), "--key-env")
    if model:
        return url, model, key
    with extra("tasks", "a model behind an endpoint"):
        import httpx
    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = httpx.get(f"{url}/models", headers=headers, timeout=30.0)
        names = [str(each["id"]) for each in answer.json()["data"]] if answer.status_code == 200 else []
        problem = "" if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:200]}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        names, problem = [], f"{type(error).__name__}: {error}"
    if problem:
        hint = "" if key else f" If it needs a key, set {_KEY}, or name another variable with --key-env."
        raise ConfigError(f"{url}/models can't be read: {problem}.{hint} A model is named as in {url}#MODEL")
    if len(names) != 1:
        raise ConfigError(f"{url} serves {', '.join(names) or 'no model'}; name one: {url}#MODEL")
    return url, names[0], key


class RemoteSession(Session):
    """A conversation with a remote model. Its spans count tokens and hold none."""

    async def _reply(
        self, new: Sequence[Message], tools: Schemas | None, limit: int | None, watch: Watch | None
    ) -> Reply:
        recording = self.recording
        sampling, usage = recording.sampling, recording.usage
        if usage.turns >= sampling.max_turns:
            raise LimitReached("turns")
        most = min(limit or sampling.max_new_tokens, sampling.max_new_tokens)
        settings: JsonObject = {
            "max_tokens": most, "temperature": sampling.temperature, "seed": (recording.seed + usage.turns) % 2**31,
        }  # fmt: skip
        if sampling.stop:
            settings["stop"] = list(sampling.stop)
        usage.turns += 1
        model = cast(RemoteModel, recording.generator)
        with recording.timing.waiting_for_generator():
            name, first = f"{recording.name}/{usage.turns}", usage.turns == 1
            answer = await model.say([*self._original, *new], tools, settings, name, first)
        usage.tool_calls += len(answer.message.get("tool_calls", ()))
        self._tools = tools
        self._original += [*new, answer.message]
        self.messages += [*new, answer.message]
        tokens = [0] * answer.tokens
        self.spans += [Span([], False), Span(tokens, True)]
        self.ends.append((len(self._original), len(self.spans)))
        completion = Completion(tokens, [0.0] * len(tokens), (0, 0), "length" if answer.cut else "stop")
        return Reply(answer.message, [], completion)


class RemoteRecording(Recording):
    """The recording of an episode whose model is a ``RemoteModel``."""

    def begin(self, role: str = "") -> Session:
        return RemoteSession(self, role)


def _sent(message: Message) -> JsonObject:
    """Return a message as the API takes it: arguments of calls are JSON texts."""
    sent: JsonObject = {name: message[name] for name in ("role", "name", "tool_call_id") if name in message}
    content = message["content"]
    if isinstance(content, str) or not image_urls([message]):
        sent["content"] = text_of(content)
    else:
        sent["content"] = [_sent_part(part) for part in content]
    if calls := message.get("tool_calls"):
        parts = [outgoing(call) for call in calls]
        sent["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in parts
        ]
    return sent


def _sent_part(part: Part) -> dict[str, object]:
    return dict(part) if part["type"] == "text" else {"type": "image_url", "image_url": {"url": part["url"]}}


def _received(values: JsonObject) -> Message:
    """Return the message of an answer. Raises ``ValueError`` for a content that is not a text."""
    message: Message = {"role": "assistant", "content": content_of(values.get("content") or "")}
    if thought := values.get("reasoning_content") or values.get("reasoning"):
        message["reasoning_content"] = thought
    calls, malformed = [], []
    for call in values.get("tool_calls") or ():
        function = call["function"]
        try:
            calls.append(incoming(call["id"], function["name"], checked_arguments(function["arguments"])))
        except ValueError as error:
            malformed.append(f"{function['name']}: {error}")
    if calls:
        message["tool_calls"] = calls
    if malformed:
        message["malformed_calls"] = malformed
    return message
