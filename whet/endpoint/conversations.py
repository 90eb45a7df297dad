"""The conversations of one episode, as an agent's calls make them up: each call finds the line that it goes on with.

A call whose messages begin with all that a line holds extends that line. Any other begins a branch: a sub-agent's own
history, one that was rewritten, a call made while the line it extends is being answered, and the same call once more,
which asks for another sample. Only where a client's library repeats a call by itself it gets the same answer.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from whet.base.errors import ConfigError, DataError
from whet.chat.renderer import Renderer
from whet.endpoint.request import Answer, ApiError, Question
from whet.rollouts.session import USED_UP, LimitReached, PromptTooLong, Recording, Reply, Session

log = logging.getLogger(__name__)


class Answers(Protocol):
    """Who answers the calls that come with one token."""

    @property
    def longest(self) -> int:
        """Most tokens that a conversation can have."""
        ...

    async def answer(self, question: Question, repeated: bool) -> Answer:
        """Return the reply. ``repeated``: the client's library asks again by itself. Raises ``ApiError``."""
        ...


@dataclass(slots=True, eq=False)
class _Call:
    """A question and its answer, perhaps still to come."""

    question: Question
    line: Session
    job: "asyncio.Task[Answer]"
    waiting: int = 0  # clients

    @property
    def failed(self) -> bool:
        """Whether it gives no answer, or is about to give none."""
        return bool(self.job.cancelled() or self.job.cancelling() or (self.job.done() and self.job.exception()))


class Conversations:
    """Answers the calls of one episode and records them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        recording.shortens = False
        self.limit: str | None = None  # the budget that the last call used up
        self.refusals = 0  # of calls for which there was no budget left
        self.failure: Exception | None = None  # of the generator, which the agent knows only as a 500
        self._calls: list[_Call] = []
        self._ignored: set[str] = set()

    @property
    def longest(self) -> int:
        return self.recording.sampling.longest

    async def answer(self, question: Question, repeated: bool) -> Answer:
        """See ``Answers``. A call that no client waits for any more is cancelled, and nothing of it is recorded."""
        self._check(question)
        call = next((one for one in reversed(self._calls) if repeated and one.question == question), None)
        if call is None or call.failed:
            line = self._line(question)
            call = _Call(question, line, asyncio.create_task(self._ask(line, question)))
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

    async def close(self) -> None:
        """Cancel what is being sampled."""
        jobs = [call.job for call in self._calls]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def refused(self, error: BaseException, base_url: str) -> bool:
        """Return whether an exception of the program is the refusal of a call for which there was no budget left: it
        tells what the endpoint said, or names the endpoint, where its library knows no more."""
        return bool(self.refusals) and any(USED_UP in text or base_url in text for text in _told(error))

    def _line(self, question: Question) -> Session:
        """Return the line with the longest history that the question goes on with, or a branch."""
        lines = self.recording.branches
        asked, tools = question.messages, question.tools
        busy = [call.line for call in self._calls if not call.job.done()]
        free = [line for line in lines if line not in busy and line.extended_by(asked, tools)]
        if free:
            return max(free, key=lambda line: len(line.messages))
        if not lines:
            return Session(self.recording)
        return max(lines, key=lambda line: line.common_prefix_length(asked, tools)).branch(asked, tools)

    async def _ask(self, line: Session, question: Question) -> Answer:
        refusals = self.refusals
        try:
            reply = await line.reply(question.messages, question.tools, question.limit)
        except LimitReached as reached:
            self.limit, self.refusals = reached.limit, refusals + 1
            raise limit_error(reached) from None
        except PromptTooLong as error:
            raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from error
        except DataError as error:
            raise ApiError(400, str(error)) from error
        except Exception as error:
            self.failure = self.failure or error
            raise
        answer = answer_of(reply)
        cut = not answer.complete and len(answer.tokens) != question.limit
        if self.refusals == refusals:  # none since this call was asked
            self.limit = "reply" if cut else None
        return answer

    def _check(self, question: Question) -> None:
        """How answers are sampled is the recipe's business, because log-probs are taken under its distribution."""
        check_tools(self.recording.renderer, question)
        sampling = self.recording.sampling
        if set(question.wanted.stop) - set(sampling.stop):
            raise ApiError(400, "stop: texts that end a reply are set in the recipe, as sampling.stop", param="stop")
        for name, value in asdict(question.wanted).items():
            if name != "stop" and value is not None and value != getattr(sampling, name, None):
                if name not in self._ignored:
                    log.warning("the agent asks for %s = %s; the recipe's sampling stays as it is", name, value)
                self._ignored.add(name)


def check_tools(renderer: Renderer, question: Question) -> None:
    """Raises ``ApiError`` where the model can't be shown the tools, or its calls of them can't be read."""
    try:
        if question.tools:
            renderer.check_tools()
    except ConfigError as error:
        raise ApiError(400, f"tools are not supported by this model: {error}", param="tools") from None


def answer_of(reply: Reply, call_ids: Iterator[str] | None = None) -> Answer:
    """Return a reply as the endpoint gives it, its calls with these ids."""
    completion, message = reply.completion, reply.message
    if completion.finish_reason == "aborted":
        raise ApiError(503, "the generator was closed")
    if call_ids and (calls := message.get("tool_calls")):
        message["tool_calls"] = [{**call, "id": id} for call, id in zip(calls, call_ids, strict=False)]
    complete = completion.finish_reason == "stop"
    return Answer(message, reply.prompt, completion.tokens, completion.logprobs, complete, completion.cached)


def limit_error(reached: LimitReached) -> ApiError:
    """A budget is used up: 400 for tokens, as OpenAI answers where a context is full, and 429 for all others."""
    if reached.limit == "tokens":
        return ApiError(400, str(reached), code="context_length_exceeded", param="messages")
    return ApiError(429, str(reached), code="limit_reached")


def _told(error: BaseException) -> Iterator[str]:
    """What an exception and its causes say, and the bodies of the HTTP answers that they stand for."""
    causes: list[BaseException] = [error]
    for cause in causes:  # grows: what caused a cause is among them
        yield str(cause)
        with contextlib.suppress(Exception):  # a foreign attribute may do anything
            yield str(getattr(cause, "url", ""))
            yield str(getattr(getattr(cause, "response", None), "text", ""))
        inner = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        found = (cause.__cause__, cause.__context__, *inner)
        causes += [one for one in found if one is not None and not any(one is other for other in causes)]
