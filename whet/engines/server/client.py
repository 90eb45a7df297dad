"""Requests to one server of an engine, and the interface that each protocol implements."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from whet.base.errors import ConfigError, GeneratorError, WhetError
from whet.base.extras import extra
from whet.engines.base import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT = "What is 12 * 34? Écrivez 日本語, 🙂."  # tokenizers that agree on it are most likely the same
_REPEATED = (408, 429, 502, 503, 504)
_RETRIES = 2
_MOST_BYTES = 500_000_000


@dataclass(slots=True, frozen=True)
class Sampled:
    """A completion as a server reports it."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    weights: tuple[str, str]  # the labels of the oldest and newest weights that sampled it
    cached: int
    read: list[int] | None = None  # the prompt as the server reads it, if it has images


class Scored(NamedTuple):
    """The answer of a server at one position of a text."""

    logprob: float  # of the text's token, at temperature 1
    top: list[tuple[int, float]]  # the most likely tokens and their log-probs, most likely first


class Scoring(Protocol):
    """The calls that score given tokens. All raise ``GeneratorError`` if the server gives no answer."""

    async def find(self, context: int | None, setting: str) -> None:
        """Find the model. Raises ``ConfigError`` if the server lacks it, or takes fewer tokens than ``context``, the
        value of ``setting``."""
        ...

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the tokens of a text; None if the server doesn't say."""
        ...

    async def score(self, tokens: list[int], start: int, k: int) -> list[Scored]:
        """Return the scores of ``tokens[start:]``, with the ``k`` most likely tokens of each. ``start`` is at least
        1."""
        ...


class Api(Scoring, Protocol):
    """The calls of one protocol. All raise ``GeneratorError`` if the server gives no answer."""

    async def check(self, vocabulary: int, context: int) -> None:
        """Raise ``ConfigError`` if the server can't do what a run needs."""
        ...

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        salt: str | None,
        sampled: Callable[[list[int]], None] | None = None,
    ) -> Sampled:
        """Return at most ``limit`` sampled tokens. ``salt`` separates prefix caches. ``sampled`` gets the tokens as
        they come. ``params.images``: the images of the marks in ``prompt``, in their order."""
        ...

    async def pause(self, keep: bool) -> None:
        """Return once the weights are not read. Requests in flight wait, and ``keep`` their KV cache."""
        ...

    async def load(self, folder: Path, label: str) -> None:
        """Load the weights in a folder, which are called ``label``."""
        ...

    async def rename(self, label: str) -> None:
        """Call the present weights ``label``."""
        ...

    async def weights(self) -> str:
        """Return the label of the present weights."""
        ...

    async def resume(self, clear: bool) -> None:
        """Continue. With ``clear`` nothing that is cached is used again."""
        ...


class Client:
    """A server's HTTP interface. It must be created in the event loop that uses it. Errors name ``section``, the
    part of the recipe that has the server's settings."""

    def __init__(self, url: str, key: str | None, deadline: float, section: str = "generator") -> None:
        with extra("tasks", f"{section} on a server"):
            from whet.fetch.http import HttpClient
        self.section, self._closed = section, False
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.url, self.deadline = url, deadline
        self._control = HttpClient(deadline, _MOST_BYTES, headers, setting=f"{section}.deadline")
        self._sampling = HttpClient(None, _MOST_BYTES, headers)  # the engine watches whether the server makes progress

    async def get(self, path: str) -> Any:
        return await self._ask(path, lambda: self._control.get(self.url + path))

    async def post(self, path: str, body: object = None) -> Any:
        return await self._ask(path, lambda: self._control.post(self.url + path, {} if body is None else body))

    async def sample(self, path: str, body: object) -> Any:
        """Post a request that may take any time. It is repeated after a failure of the network: its result is a
        function of weights, prompt and seed."""
        return await self._ask(path, lambda: self._sampling.post(self.url + path, body))

    async def follow(self, path: str, body: object, begin: Callable[[], Callable[[Any], None]]) -> Any:
        """Post a request whose answer comes as events. Each attempt gives them to a new receiver. Return None, or the
        answer of a server that sends it whole."""
        from whet.fetch.http import Answer, UnansweredError

        async def send() -> Answer:
            receive, complete = begin(), False

            def event(data: str) -> None:
                nonlocal complete
                complete = complete or data == "[DONE]"
                if not complete:
                    receive(self._event(path, data))

            answer = await self._sampling.follow(self.url + path, body, event)
            if answer.status == 200 and not answer.text and not complete:
                raise UnansweredError("the stream broke off")
            return answer

        return await self._ask(path, send) or None

    def _event(self, path: str, data: str) -> Any:
        """Return the value of an event. Raises ``GeneratorError`` for an error of the server."""
        try:
            value = json.loads(data)
        except ValueError:
            raise GeneratorError(f"the server {self.url} streams no JSON at {path}: {data[:200]!r}") from None
        if isinstance(value, dict) and value.get("error"):
            raise GeneratorError(f"the server {self.url} failed at {path}: {str(value['error'])[:500]}")
        return value

    async def status(self, path: str) -> int:
        """Return the HTTP status of a page; 0 if the server doesn't answer."""
        from whet.fetch.http import UnansweredError

        self._check_open()
        try:
            return (await self._control.get(self.url + path)).status
        except UnansweredError:
            return 0

    async def _ask(self, path: str, send: Any) -> object:
        from whet.fetch.http import Answer, UnansweredError, retried

        async def attempt(number: int) -> Answer:
            self._check_open()
            answer: Answer = await send()
            if answer.status in _REPEATED:
                raise UnansweredError(f"HTTP {answer.status}: {answer.text[:200]}")
            return answer

        try:
            answer = await retried(attempt, _RETRIES, "server", self.url, path)
        except UnansweredError as error:
            raise GeneratorError(f"the server {self.url} gives no answer at {path}: {error}") from None
        if answer.status in (401, 403):
            raise ConfigError(
                f"the server {self.url} refuses access to {path} (HTTP {answer.status}); set "
                f"{self.section}.api_key_env to the name of the environment variable that holds its key"
            )
        if answer.status >= 500:
            raise GeneratorError(f"the server {self.url} failed at {path}: HTTP {answer.status}: {answer.text[:500]}")
        if answer.status != 200:
            raise RefusedError(f"the server {self.url} refuses {path}: HTTP {answer.status}: {answer.text[:500]}")
        try:
            return answer.json() if answer.text.startswith(("{", "[")) else answer.text
        except ValueError:
            raise GeneratorError(f"the server {self.url} answers {path} with no JSON: {answer.text[:200]!r}") from None

    def _check_open(self) -> None:
        if self._closed:  # by a router that found the server lost, while this call waited
            raise GeneratorError(f"the connection to the server {self.url} is closed")

    async def close(self) -> None:
        self._closed = True
        await self._control.close()
        await self._sampling.close()


class RefusedError(WhetError):
    """The server understood a request and refuses it."""


async def check_tokenizer(api: Scoring, client: Client, tokenizer: "PreTrainedTokenizerBase", model: str) -> None:
    """Raise ``ConfigError`` if a server encodes a text otherwise than ``tokenizer``, that of the setting ``model``."""
    try:
        theirs = await api.tokenize(_TEXT)
    except (LookupError, TypeError):
        raise ConfigError(
            f"{client.section}: {client.url} gives no tokens of a text at /tokenize; another program may answer there"
        ) from None
    if theirs is None:
        return
    ours = list(tokenizer.encode(_TEXT, add_special_tokens=False))
    if theirs != ours:
        raise ConfigError(
            f"{client.section}: {client.url} has another tokenizer than {model}: it encodes {_TEXT!r} as "
            f"{theirs[:8]}..., the run as {ours[:8]}...; serve the same model"
        )
