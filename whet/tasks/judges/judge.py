"""The client of a judge, which is a language model that is asked for verdicts over OpenAI's chat API, on a server, in a
process of the run or, for the policy, in the run's generator.

A request is repeated if the server fails or the verdict can't be read. After a failure the same request is sent, so no
failure changes a verdict. After a reply without a verdict it has another seed, and temperature 1 if it was 0, since the
same words would come again; each run repeats a request in the same way. A failure that persists is an infrastructure
failure and raises an error; it is never a reward.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from whet.base.addresses import key_in
from whet.base.errors import ConfigError
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.core.content import in_text
from whet.core.types import Message
from whet.fetch.http import Answer, HttpClient, UnansweredError, retried
from whet.tasks.base import AskPolicy, Environments, TaskSet, called
from whet.tasks.judges.config import NO_POLICY, Judge
from whet.tasks.judges.hosted import HostedLine

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

log = logging.getLogger(__name__)

_REPEAT = {408, 409, 425, 429, *range(500, 600)}  # HTTP statuses after which a request is repeated
_ABOUT_THE_TEXT = {400, 413, 422}  # HTTP statuses for a text that is too long or unreadable, or for any bad request
_GREETING: list[Message] = [{"role": "user", "content": "Hello."}]
_MAX_BYTES = 4_000_000
_AGAIN = 1.0  # the temperature of a repeat after a greedy reply without a verdict, which would be the same
_ROUNDED = 0.01  # the most that rounding makes of a log-prob of 0
_LIKELIEST = 20  # tokens with log-probs, the most that OpenAI's API returns


class JudgeError(Exception):
    """The judge gave no verdict. An infrastructure failure: the episode or group is repeated or dropped."""


class AnswerRefusedError(JudgeError):
    """The judge refuses this request but accepts others: its texts are too long, for example."""


class JudgeClient:
    """A client of a judge. It must be created in the event loop that uses it."""

    def __init__(
        self,
        judge: Judge,
        transport: "httpx.AsyncBaseTransport | None" = None,
        role: str = "judge",
        policy: AskPolicy | None = None,
    ) -> None:
        """``transport`` replaces the network in tests; ``role`` names the model in errors, if it is not a judge.
        ``policy`` is asked if it is the judge. Raise ``ConfigError`` if the key is not in the environment, or the
        judge is the policy and there isn't any."""
        self.judge, self.role = judge, role
        self.name = f"the {role} {judge.model}" if judge.url is None else f"the {role} at {judge.url}"
        if judge.is_policy:
            self.name = f"the policy as the {role}"
        key = key_in(judge.api_key_env, "judge.api_key_env")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._slots = asyncio.Semaphore(judge.concurrency)
        self._works = False  # whether the judge has answered a request
        self._warned = False  # about refused answers
        self._line: HostedLine | HttpClient | PolicyLine
        if judge.is_policy:
            self._line = PolicyLine(policy)
        elif judge.url is None:
            self._line = HostedLine(judge, self.name)
        else:
            self._line = HttpClient(judge.deadline, _MAX_BYTES, headers, transport, "judge.deadline")

    async def ask(
        self, messages: Sequence[Message], read: Callable[[str], T | None], name: str, whole: bool = False
    ) -> T:
        """Return the verdict that ``read`` extracts from the reply without its thought. If it returns None, or a limit
        cut the thought, the judge is asked again, with another seed and at a temperature above 0. ``name`` names the
        judged answer and determines the seeds. ``whole``: a reply that a limit cut is not read, because what looks like
        a verdict in it may be a part of one, or quoted from the answer or the question.

        Raises ``JudgeError`` if no reply could be read, ``AnswerRefusedError`` if the judge refuses these messages,
        and ``ConfigError`` if it refuses all requests.
        """

        def written(choice: JsonObject) -> T:
            text = choice["message"]["content"]
            if not isinstance(text, str):
                raise UnansweredError("its answer has no text")
            text = text.rpartition("</think>")[2]
            if text.lstrip().startswith("<think>"):
                raise UnansweredError("its thought was cut; raise max_tokens")
            if whole and choice.get("finish_reason") == "length":
                raise UnansweredError("its reply was cut before its end; raise max_tokens")
            if (value := read(text)) is None:
                raise UnansweredError(f"no verdict in {text[-200:]!r}")
            return value

        return await self._asked(messages, written, name)

    async def choose(self, messages: Sequence[Message], choices: Collection[str], name: str) -> dict[str, float]:
        """Return the probability of each choice, relative to all choices, as the first token of the reply. Raises what
        ``ask`` raises; ``JudgeError`` if none is among the likeliest tokens of a server."""

        def verdict(choice: JsonObject) -> dict[str, float]:
            first = choice["logprobs"]["content"][0]["top_logprobs"]
            return shares({scored["token"]: float(scored["logprob"]) for scored in first}, choices)

        # A judge in the run tells the log-prob of each choice, however unlikely an answer has made them all.
        which = {"among": list(choices)} if self.judge.url is None else {"top_logprobs": _LIKELIEST}
        return await self._asked(messages, verdict, name, {"max_tokens": 1, "logprobs": True, **which})

    async def _asked(
        self, messages: Sequence[Message], verdict: Callable[[dict[str, object]], T], name: str,
        changes: Mapping[str, object] | None = None,
    ) -> T:  # fmt: skip
        """Return what ``verdict`` reads from the ``choices[0]`` of an answer."""
        judge, replies = self.judge, 0  # that had no verdict

        async def attempt(_: int) -> T:
            nonlocal replies
            temperature = judge.temperature if replies == 0 else judge.temperature or _AGAIN
            body: JsonObject = {
                "model": judge.model, "messages": in_text(messages), "temperature": temperature,
                "max_tokens": judge.max_tokens, "seed": derive_seed("judge", name, replies) % 2**31, **(changes or {}),
            }  # fmt: skip
            async with self._slots:
                answer = await self._post(body)
            try:
                return verdict(answer.json()["choices"][0])
            except UnansweredError:
                replies += 1
                raise
            except (ValueError, LookupError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}, in the answer {answer.text[:200]!r}"
                raise UnansweredError(reason) from None

        try:
            return await retried(attempt, judge.retries, "judge", name)
        except UnansweredError as error:
            what = "verdict on" if self.role == "judge" else "answer for"
            why = f"{self.name} gave no {what} {name} in {judge.retries + 1} attempts: {error}"
            raise JudgeError(why) from None

    async def _post(self, body: dict[str, object]) -> Answer:
        """Return the answer to a request that the judge accepts. Raises ``UnansweredError``, ``AnswerRefusedError`` or
        ``ConfigError``."""
        url = (self.judge.url or "").rstrip("/") + "/chat/completions"
        answer = await self._line.post(url, body)
        if answer.status == 200:
            self._works = True
            return answer
        if answer.status in _REPEAT:
            raise UnansweredError(f"HTTP {answer.status}: {answer.text[:200]}", answer.wait)
        why = f"{self.name} refuses the request with HTTP {answer.status}: {answer.text[:300]}"
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
        await self._line.close()


class PolicyLine:
    """The connection to a judge that is the policy, used like ``HttpClient``."""

    def __init__(self, ask: AskPolicy | None) -> None:
        """Raise ``ConfigError`` if there is no policy."""
        if ask is None:
            raise ConfigError(NO_POLICY)
        self._ask = ask

    async def post(self, url: str, body: object) -> Answer:
        """Return the answer to a request of the chat API; the ``url`` is not read. Raises the errors of the
        generator."""
        return Answer(*await self._ask(json.dumps(body)))

    async def close(self) -> None:
        """Do nothing: the run closes its generator."""


def shares(logprobs: Mapping[str, float], choices: Collection[str]) -> dict[str, float]:
    """Return the probability of each choice relative to all choices, from the log-probs of tokens. White space around a
    token doesn't count. Raises ``UnansweredError`` if no token is a choice, or a number is not a log-prob."""
    mass = dict.fromkeys(choices, 0.0)
    for token, logprob in logprobs.items():
        if not logprob <= _ROUNDED:
            raise UnansweredError(f"it reports {logprob:.3g} for {token!r}, which is not a log-prob")
        if (word := token.strip()) in mass:
            mass[word] += math.exp(logprob)
    if not (total := math.fsum(mass.values())) > 0:
        raise UnansweredError(
            f"none of {', '.join(choices)} is among the likeliest first tokens, {', '.join(map(repr, logprobs))}; ask "
            "for words that are single tokens of the judge"
        )
    return {choice: value / total for choice, value in mass.items()}


class JudgeEnvironments(Environments):
    """Base of environments of another task set that ask a judge. The first question creates the client, in the event
    loop that asks."""

    def __init__(self, taskset: TaskSet, judge: Judge) -> None:
        self.inner, self.judge = taskset.open(), judge
        self._client: JudgeClient | None = None
        self._policy: AskPolicy | None = None

    @property
    def client(self) -> JudgeClient:
        self._client = self._client or JudgeClient(self.judge, policy=self._policy)
        return self._client

    def use_policy(self, ask: AskPolicy) -> None:
        self._policy = ask
        self.inner.use_policy(ask)

    @property
    def restarts(self) -> int:
        return self.inner.restarts

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await called(self.inner.close)
