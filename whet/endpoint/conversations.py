"""The conversations of one episode, as an agent's calls make them up: each call finds the line that it goes on with.

A call whose messages begin with all that a line holds extends that line. Any other begins a branch: a sub-agent's own
history, one that was rewritten, a call made while the line it extends is being answered, and the same call once more,
which asks for another sample. Only where a client's library repeats a call by itself it gets the same answer.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from whet.endpoint.request import Answer, ApiError, Question
from whet.errors import DataError
from whet.rollouts.session import LimitReached, Recording, Reply, Session
from whet.types import Message

log = logging.getLogger(__name__)


class Answers(Protocol):
    """Who answers the calls that come with one token."""

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


class Conversations:
    """Answers the calls of one episode and records them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.limit: str | None = None  # the budget that was used up
        self.failure: Exception | None = None  # of the generator, which the agent knows only as a 500
        self._calls: list[_Call] = []
        self._said: dict[tuple[str, str], Message] = {}
        self._ignored: set[str] = set()

    async def answer(self, question: Question, repeated: bool) -> Answer:
        """See ``Answers``. A call that nobody waits for any more is cancelled, and nothing of it is recorded."""
        self._check(question)
        question.messages = [self._restored(message) for message in question.messages]
        call = next((one for one in reversed(self._calls) if repeated and one.question == question), None)
        if call is None or call.job.cancelled() or (call.job.done() and call.job.exception()):
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

    def _line(self, question: Question) -> Session:
        """Return the line with the longest history that the question goes on with, or a branch."""
        lines = self.recording.lines
        asked, tools = question.messages, question.tools
        busy = [call.line for call in self._calls if not call.job.done()]
        free = [line for line in lines if line not in busy and line.extended_by(asked, tools)]
        if free:
            return max(free, key=lambda line: len(line.messages))
        if not lines:
            return Session(self.recording)
        return max(lines, key=lambda line: line.in_common(asked, tools)).branch(asked, tools)

    async def _ask(self, line: Session, question: Question) -> Answer:
        try:
            reply = await line.reply(question.messages, question.tools, question.limit)
        except LimitReached as reached:
            self.limit = reached.limit
            raise limit_error(reached) from None
        except DataError as error:
            raise ApiError(400, str(error)) from error
        except Exception as error:
            self.failure = self.failure or error
            raise
        self._said[_key(reply.message)] = reply.message
        answer = answer_of(reply)
        cut = not answer.complete and len(answer.tokens) != question.limit
        self.limit = "reply" if cut else None
        return answer

    def _restored(self, message: Message) -> Message:
        """A reply that comes back with other white space, or other ids of its calls, is still what the model said."""
        said = self._said.get(_key(message)) if message["role"] == "assistant" else None
        if said is None:
            return message
        restored: Message = {**message, "content": said["content"]}
        return {**restored, "tool_calls": said["tool_calls"]} if "tool_calls" in said else restored

    def _check(self, question: Question) -> None:
        """How answers are sampled is the recipe's business, because log-probs are taken under its distribution."""
        sampling = self.recording.sampling
        if set(question.wanted.stop) - set(sampling.stop):
            raise ApiError(400, "stop: texts that end a reply are set in the recipe, as sampling.stop", param="stop")
        for name, value in asdict(question.wanted).items():
            if name != "stop" and value is not None and value != getattr(sampling, name, None):
                if name not in self._ignored:
                    log.warning("the agent asks for %s = %s; the recipe's sampling stays as it is", name, value)
                self._ignored.add(name)


def answer_of(reply: Reply) -> Answer:
    """Return a reply as the endpoint gives it."""
    completion = reply.completion
    if completion.finish_reason == "aborted":
        raise ApiError(503, "the generator was closed")
    complete = completion.finish_reason == "stop"
    return Answer(reply.message, reply.prompt, completion.tokens, completion.logprobs, complete, completion.cached)


def limit_error(reached: LimitReached) -> ApiError:
    """A budget is used up: 400 for tokens, as OpenAI answers where a context is full, and 429 for all others."""
    if reached.limit == "tokens":
        return ApiError(400, str(reached), code="context_length_exceeded", param="messages")
    return ApiError(429, str(reached), code="limit_reached")


def _key(message: Message) -> tuple[str, str]:
    calls: Sequence[object] = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"].strip(), json.dumps(calls, sort_keys=True)
