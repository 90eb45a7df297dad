"""A language model that is asked for a verdict, behind any URL that speaks OpenAI's chat API, as ``whet serve`` does.

A verdict that can't be read is asked for again, a server that fails is tried again; what still fails then is a failure
of infrastructure and raises. It is never a reward.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import Field

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.base.seeds import derive_seed
from whet.config import Config
from whet.core.content import in_text
from whet.core.types import Message
from whet.fetch.post import bounded, pause

with extra("tasks", "a judge"):
    import httpx

T = TypeVar("T")

log = logging.getLogger(__name__)

_AGAIN = {408, 409, 425, 429, *range(500, 600)}  # answers of a server that may do better next time
_ABOUT_THE_TEXT = {400, 413, 422}  # too long for the judge, or with characters that it can't take; or any bad request
_GREETING: list[Message] = [{"role": "user", "content": "Hello."}]
_MOST_BYTES = 4_000_000


class Judge(Config):
    """Where a judge is, and how it is asked."""

    url: str = Field(pattern=r"^https?://")
    """Of its API, e.g. http://127.0.0.1:8000/v1."""
    model: str
    """Its name there."""
    api_key_env: str | None = None
    """The environment variable that holds the key; None: no key."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, gt=0)
    """Longest verdict."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for one request."""
    retries: int = Field(3, ge=0)
    """How often it is asked again after a failure, or a verdict that can't be read."""
    concurrency: int = Field(16, gt=0)
    """Requests at once."""


class JudgeError(Exception):
    """The judge gave no verdict. A failure of infrastructure: the episode or group is repeated or dropped."""


class AnswerRefusedError(JudgeError):
    """The judge takes other requests, but not this one: the texts in it are too long for it, say."""


class JudgeClient:
    """Asks a judge. Made in the event loop that asks."""

    def __init__(self, judge: Judge, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises ``ConfigError`` where the key is not in the environment. ``transport`` stands for the network."""
        self.judge = judge
        headers = {}
        if judge.api_key_env is not None:
            if judge.api_key_env not in os.environ:
                raise ConfigError(f"judge.api_key_env: the environment variable {judge.api_key_env} is not set")
            headers["Authorization"] = f"Bearer {os.environ[judge.api_key_env]}"
        self._slots = asyncio.Semaphore(judge.concurrency)
        self._works = False  # it has answered a request
        self._warned = False  # of refused answers
        self._http = httpx.AsyncClient(timeout=judge.deadline, headers=headers, transport=transport)

    async def ask(self, messages: Sequence[Message], read: Callable[[str], T | None], name: str) -> T:
        """Return what ``read`` finds in the reply. ``name`` says what is judged; seeds derive from it.

        Raises ``JudgeError`` when no reply could be read, ``AnswerRefusedError`` where the server refuses these
        messages, and ``ConfigError`` where it refuses all."""
        problem = ""
        for attempt in range(self.judge.retries + 1):
            if attempt:
                await asyncio.sleep(pause(attempt, "judge", name))
            async with self._slots:
                text, problem = await self._post(messages, derive_seed("judge", name, attempt))
            if text is not None:
                verdict = read(text)
                if verdict is not None:
                    return verdict
                problem = f"no verdict in {text[-200:]!r}"
        raise JudgeError(f"the judge at {self.judge.url} said nothing of {name} in {attempt + 1} attempts: {problem}")

    async def _post(self, messages: Sequence[Message], seed: int) -> tuple[str | None, str]:
        """Return the reply, or None and what went wrong."""
        judge = self.judge
        body: dict[str, Any] = {
            "model": judge.model, "messages": in_text(messages), "temperature": judge.temperature,
            "max_tokens": judge.max_tokens, "seed": seed % 2**31,
        }  # fmt: skip
        try:
            async with asyncio.timeout(judge.deadline):
                return await self._read(body)
        except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError) as error:
            return None, f"{type(error).__name__}: {error}"

    async def _read(self, body: dict[str, Any]) -> tuple[str | None, str]:
        url = self.judge.url.rstrip("/") + "/chat/completions"
        async with self._http.stream("POST", url, json=body) as response:
            content = await bounded(response, _MOST_BYTES)
        if response.status_code in _AGAIN:
            return None, f"HTTP {response.status_code}: {content[:200]!r}"
        if response.status_code != 200:
            shown = content[:300].decode("utf-8", "replace")
            why = f"the judge at {url} refuses the request with HTTP {response.status_code}: {shown}"
            if response.status_code in _ABOUT_THE_TEXT and body["messages"] != _GREETING:
                if not self._works:  # raises where it refuses a short and plain request as well
                    await self._read(body | {"messages": _GREETING})
                if self._works:
                    if not self._warned:
                        log.warning("%s. It takes others, so this answer and others like it get the worst grade", why)
                    self._warned = True
                    raise AnswerRefusedError(why)
                return None, why
            raise ConfigError(why)
        self._works = True
        choice = httpx.Response(200, content=content).json()["choices"][0]
        if not isinstance(text := choice["message"]["content"], str):
            return None, "its answer holds no text"
        return text, ""

    async def close(self) -> None:
        await self._http.aclose()
