"""The conversations of one episode, reconstructed from an agent's calls: each call extends a branch or begins one.

A call whose messages begin with all messages of a branch extends that branch. Any other call begins a new one: the
history of a sub-agent, a rewritten history, a call during an unfinished call of the same branch, and a repeated call,
which asks for another sample. Only an automatic retry of the client's library gets the same answer.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from whet.base.closing import cancel_all
from whet.base.errors import ConfigError, DataError
from whet.base.strict_json import JsonObject
from whet.chat.renderer import Renderer
from whet.endpoint.request import Answer, ApiError, Question
from whet.rollouts.session import USED_UP, LimitReached, PromptTooLong, Recording, Reply, Session
from whet.rollouts.watched import Watch

T = TypeVar("T")

log = logging.getLogger(__name__)

_TRIES = 3  # of a refused call, before the episode ends
_REMEMBERED = 2**20  # tokens of the prompts of answers that a retry may ask for, of 4 bytes each


class Responder(Protocol):
    """Answers the calls with one token."""

    @property
    def longest(self) -> int:
        """The maximal number of tokens of a conversation."""
        ...

    async def answer(self, question: Question, repeated: bool, watch: Watch | None = None) -> Answer:
        """Return the reply. ``repeated``: an automatic retry of the client's library. ``watch`` is called while it is
        sampled, if the engine hands out tokens. Raises ``ApiError``."""
        ...


@dataclass(slots=True, eq=False)
class _Call:
    """A call of the agent, and the task that answers it."""

    key: bytes  # of the question
    branch: Session
    job: "asyncio.Task[Answer]"
    waiting: int = 0  # number of clients

    @property
    def failed(self) -> bool:
        """True if it failed or was cancelled."""
        return bool(self.job.cancelled() or self.job.cancelling() or (self.job.done() and self.job.exception()))


class Conversations:
    """Answers the calls of one episode and records them."""

    def __init__(self, recording: Recording, ignored: set[str] | None = None) -> None:
        """``ignored``: the names of requested settings that were warned of, in all episodes of a run."""
        self.recording = recording
        recording.shortens = False
        self.limit: str | None = None  # the budget that the last call exhausted
        self.refusals = 0  # number of calls refused because a budget was exhausted
        self._refused: Counter[bytes] = Counter()  # these calls
        self._repeats = asyncio.Event()  # set when one of them was made _TRIES times
        self.failure: Exception | None = None  # the error of the generator; the agent only gets status 500
        self._calls: list[_Call] = []  # in flight, and answered lately
        self._ignored = set() if ignored is None else ignored

    @property
    def longest(self) -> int:
        return self.recording.sampling.longest

    async def answer(self, question: Question, repeated: bool, watch: Watch | None = None) -> Answer:
        """See ``Responder``. A call is cancelled, and not recorded, when its last client has disconnected."""
        self._check(question)
        key = _key(question)
        call = next((call for call in reversed(self._calls) if repeated and call.key == key), None)
        if call is None or call.failed:
            self._calls = _remembered(self._calls)
            branch = self._branch(question)
            call = _Call(key, branch, asyncio.create_task(self._ask(branch, question, key, watch)))
            self._calls.append(call)
        call.waiting += 1
        try:
            return await asyncio.shield(call.job)
        except asyncio.CancelledError:
            if call.job.cancelled():
                raise ApiError(410, "the episode has ended", code="episode_ended") from None
            raise
        finally:
            call.waiting -= 1
            if not call.waiting:
                call.job.cancel()

    async def unless_it_repeats(self, program: Coroutine[object, object, T]) -> T:
        """Return the result of a program. Raises ``LimitReached`` when it makes a refused call for the third time: many
        libraries repeat any call that fails, some for minutes, and no repeat can succeed."""
        running, repeats = asyncio.ensure_future(program), asyncio.ensure_future(self._repeats.wait())
        try:
            await asyncio.wait((running, repeats), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            raise LimitReached(self.limit or "turns")
        finally:
            await cancel_all([job for job in (running, repeats) if not job.done()])

    async def close(self) -> None:
        """Cancel unfinished calls."""
        jobs = [call.job for call in self._calls]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def refused(self, error: BaseException, base_url: str) -> bool:
        """Return whether an exception of the program was caused by a call that was refused because a budget was
        exhausted: it contains the endpoint's message, or, with some HTTP libraries, only its address."""
        return bool(self.refusals) and any(USED_UP in text or base_url in text for text in _texts(error))

    def _branch(self, question: Question) -> Session:
        """Return the longest branch that the question extends, or a new one."""
        branches = self.recording.branches
        messages, tools = question.messages, question.tools
        busy = [call.branch for call in self._calls if not call.job.done()]
        free = [branch for branch in branches if branch not in busy and branch.extended_by(messages, tools)]
        if free:
            return max(free, key=lambda branch: len(branch.messages))
        if not branches:
            return self.recording.begin()
        closest = max(branches, key=lambda branch: branch.common_prefix_length(messages, tools))
        return closest.branch(messages, tools)

    async def _ask(self, branch: Session, question: Question, key: bytes, watch: Watch | None) -> Answer:
        refusals = self.refusals
        try:
            reply = await branch.reply(question.messages, question.tools, question.limit, watch)
        except LimitReached as reached:
            self.limit, self.refusals = reached.limit, refusals + 1
            self._refused[key] += 1
            if self._refused[key] >= _TRIES:
                self._repeats.set()
            raise limit_error(reached) from None
        except PromptTooLong as error:
            raise context_error(str(error)) from error
        except DataError as error:
            raise ApiError(400, str(error)) from error
        except Exception as error:
            self.failure = self.failure or error
            raise
        answer = answer_of(reply)
        cut = not answer.complete and len(answer.tokens) != question.limit
        if self.refusals == refusals:  # no call was refused since this one began
            self.limit = "reply" if cut else None
        return answer

    def _check(self, question: Question) -> None:
        """Ignore requested sampling settings, with a warning, because log-probs are defined under the recipe's."""
        check_tools(self.recording.renderer, question.tools)
        sampling = self.recording.sampling
        if set(question.sampling.stop) - set(sampling.stop):
            raise ApiError(400, "stop: set the texts that end a reply in the recipe, as sampling.stop", param="stop")
        recipe = dict(sampling)
        for name, value in asdict(question.sampling).items():
            if name != "stop" and value is not None and value != recipe.get(name):
                if name not in self._ignored:
                    log.warning("the agent requested %s = %s; ignored, the recipe's sampling applies", name, value)
                self._ignored.add(name)


def _key(question: Question) -> bytes:
    """Return a digest of a question. Questions themselves would take memory that grows with the square of the turns."""
    asked = [question.messages, question.tools, question.limit, asdict(question.sampling)]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).digest()


def _remembered(calls: list[_Call]) -> list[_Call]:
    """Return the calls in flight and the last ones that were answered, in order."""
    kept, tokens = list[_Call](), 0
    for call in reversed(calls):
        if call.job.done():
            if call.failed:
                continue
            tokens += len(call.job.result().prompt)
        if tokens <= _REMEMBERED or not call.job.done():
            kept.append(call)
    return kept[::-1]


def check_tools(renderer: Renderer, tools: Sequence[JsonObject] | None) -> None:
    """Raise ``ApiError`` if the chat template can't render the tools, or calls of them can't be parsed."""
    try:
        if tools:
            renderer.check_tools()
    except ConfigError as error:
        raise ApiError(400, f"tools are not supported by this model: {error}", param="tools") from None


def answer_of(reply: Reply, call_ids: Iterator[str] | None = None) -> Answer:
    """Return the answer of the endpoint; ``call_ids`` replace the ids of its tool calls."""
    completion, message = reply.completion, reply.message
    if completion.finish_reason == "aborted":
        raise ApiError(503, "the generator was closed")
    if call_ids and (calls := message.get("tool_calls")):
        message["tool_calls"] = [{**call, "id": id} for call, id in zip(calls, call_ids, strict=False)]
    complete = completion.finish_reason == "stop"
    prompt = array("i", reply.prompt)
    return Answer(message, prompt, completion.tokens, completion.logprobs, complete, completion.cached)


def limit_error(reached: LimitReached) -> ApiError:
    """Return the error for an exhausted budget: 400 for tokens, like OpenAI for a full context, otherwise 429."""
    if reached.limit == "tokens":
        return context_error(str(reached))
    return ApiError(429, str(reached), code="limit_reached")


def context_error(why: str) -> ApiError:
    """Return the error for a conversation that is too long, with OpenAI's words, by which agents know it."""
    text = f"This model's maximum context length is exceeded: {why}"
    return ApiError(400, text, code="context_length_exceeded", param="messages")


def _texts(error: BaseException) -> Iterator[str]:
    """Yield the texts of an exception and its causes, and the addresses and bodies of their HTTP responses."""
    causes: list[BaseException] = [error]
    for cause in causes:  # grows during the loop
        yield str(cause)
        with contextlib.suppress(Exception):  # attributes of foreign classes may raise anything
            yield str(getattr(cause, "url", ""))
            yield str(getattr(getattr(cause, "response", None), "text", ""))
        inner = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        reasons = (cause.__cause__, cause.__context__, *inner)
        seen = set(map(id, causes))
        causes += [reason for reason in reasons if reason is not None and id(reason) not in seen]
