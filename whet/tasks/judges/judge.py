"""A judge: a language model behind an OpenAI-compatible chat API, such as ``whet serve``'s, that is asked for verdicts.

A request is repeated if the server fails or the verdict can't be read. A failure that persists is an infrastructure
failure and raises an error; it is never a reward.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from whet.base.errors import ConfigError
from whet.base.seeds import derive_seed
from whet.config import Config
from whet.core.content import in_text
from whet.core.types import Message
from whet.fetch.http import Answer, HttpClient, UnansweredError, retried
from whet.tasks.base import Environments, TaskSet, called

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

log = logging.getLogger(__name__)

_REPEAT = {408, 409, 425, 429, *range(500, 600)}  # HTTP statuses after which a request is repeated
_ABOUT_THE_TEXT = {400, 413, 422}  # HTTP statuses for a text that is too long or unreadable, or for any bad request
_GREETING: list[Message] = [{"role": "user", "content": "Hello."}]
_MAX_BYTES = 4_000_000


class Judge(Config):
    """The address of a judge, and the settings of requests to it."""

    url: str = Field(pattern=r"^https?://")
    """The URL of its API, e.g. http://127.0.0.1:8000/v1."""
    model: str
    """The name of the model in requests."""
    api_key_env: str | None = None
    """The environment variable that holds the key; None: no key."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, gt=0)
    """Most tokens of a verdict."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for one request."""
    retries: int = Field(3, ge=0)
    """Repeats of a request after a failure, or a verdict that can't be read."""
    concurrency: int = Field(16, gt=0)
    """Most requests in flight."""


class JudgeError(Exception):
    """The judge gave no verdict. An infrastructure failure: the episode or group is repeated or dropped."""


class AnswerRefusedError(JudgeError):
    """The judge refuses this request but accepts others: its texts are too long, for example."""


class JudgeClient:
    """A client of a judge. It must be created in the event loop that uses it."""

    def __init__(self, judge: Judge, transport: "httpx.AsyncBaseTransport | None" = None, role: str = "judge") -> None:
        """``transport`` replaces the network in tests; ``role`` names the model in errors, if it is not a judge. Raise
        ``ConfigError`` if the key is not in the environment."""
        self.judge, self.role = judge, role
        headers = {}
        if judge.api_key_env is not None:
            if judge.api_key_env not in os.environ:
                raise ConfigError(
                    f"judge.api_key_env: the environment variable {judge.api_key_env} is not set; set it to the API key"
                )
            headers["Authorization"] = f"Bearer {os.environ[judge.api_key_env]}"
        self._slots = asyncio.Semaphore(judge.concurrency)
        self._works = False  # whether the judge has answered a request
        self._warned = False  # about refused answers
        self._http = HttpClient(judge.deadline, _MAX_BYTES, headers, transport)

    async def ask(self, messages: Sequence[Message], read: Callable[[str], T | None], name: str) -> T:
        """Return the verdict that ``read`` extracts from the reply. If it returns None, the judge is asked again.
        ``name`` names the judged answer and determines the seeds.

        Raises ``JudgeError`` if no reply could be read, ``AnswerRefusedError`` if the server refuses these messages,
        and ``ConfigError`` if it refuses all requests.
        """

        async def attempt(number: int) -> T:
            async with self._slots:
                text = await self._reply(messages, derive_seed("judge", name, number))
            if (verdict := read(text)) is None:
                raise UnansweredError(f"no verdict in {text[-200:]!r}")
            return verdict

        try:
            return await retried(attempt, self.judge.retries, "judge", name)
        except UnansweredError as error:
            what = "verdict on" if self.role == "judge" else "answer for"
            attempts = self.judge.retries + 1
            why = f"the {self.role} at {self.judge.url} gave no {what} {name} in {attempts} attempts: {error}"
            raise JudgeError(why) from None

    async def _reply(self, messages: Sequence[Message], seed: int) -> str:
        """Return the text of the judge's reply. Raises ``UnansweredError`` if the answer has none."""
        judge = self.judge
        body: dict[str, Any] = {
            "model": judge.model, "messages": in_text(messages), "temperature": judge.temperature,
            "max_tokens": judge.max_tokens, "seed": seed % 2**31,
        }  # fmt: skip
        answer = await self._post(body)
        try:
            text = json.loads(answer.text)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise UnansweredError(f"{type(error).__name__}: {error}") from None
        if not isinstance(text, str):
            raise UnansweredError("its answer has no text")
        return text

    async def _post(self, body: dict[str, Any]) -> Answer:
        """Return the answer to a request that the judge accepts. Raises ``UnansweredError``, ``AnswerRefusedError`` or
        ``ConfigError``."""
        url = self.judge.url.rstrip("/") + "/chat/completions"
        answer = await self._http.post(url, body)
        if answer.status == 200:
            self._works = True
            return answer
        if answer.status in _REPEAT:
            raise UnansweredError(f"HTTP {answer.status}: {answer.text[:200]}")
        why = f"the {self.role} at {url} refuses the request with HTTP {answer.status}: {answer.text[:300]}"
        if answer.status not in _ABOUT_THE_TEXT or body["messages"] == _GREETING:
            raise ConfigError(why)
        if not self._works:  # raises ConfigError if it refuses a short and plain request, too
            await self._post(body | {"messages": _GREETING})
        if not self._warned:
            outcome = "refused answers get the worst grade" if self.role == "judge" else "such episodes are dropped"
            log.warning("%s. It accepts other requests, so %s", why, outcome)
        self._warned = True
        raise AnswerRefusedError(why)

    async def close(self) -> None:
        await self._http.close()


class JudgeEnvironments(Environments):
    """Base of environments of another task set that ask a judge. The first question creates the client, in the event
    loop that asks."""

    def __init__(self, taskset: TaskSet, judge: Judge) -> None:
        self.inner, self.judge = taskset.open(), judge
        self._client: JudgeClient | None = None

    @property
    def client(self) -> JudgeClient:
        self._client = self._client or JudgeClient(self.judge)
        return self._client

    @property
    def restarts(self) -> int:
        return self.inner.restarts

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await called(self.inner.close)
