"""A line of conversation between whoever drives an episode and the model, recorded as the tokens that the model saw.

    environment ──► run_episode ─┐                    ┌─► renderer: messages <-> tokens
                                 ├─► Session.reply ───┤
    agent ──HTTP──► endpoint ────┘                    └─► generator: tokens -> tokens

Tokens are only ever appended: what was sampled is not decoded and encoded again. Where a history is rewritten another
line begins, a branch. All lines of an episode share its budgets. Knows no environment, no group and no learner.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from whet.base.errors import DataError
from whet.base.seeds import derive_seed
from whet.chat.calls import call_id
from whet.chat.renderer import Renderer
from whet.core.expert_ids import fill_missing
from whet.core.types import Message, Span, Trajectory, Usage
from whet.engines.base import Completion, Generator, SamplingParams
from whet.metrics.clock import Timing
from whet.rollouts.observation import shorten
from whet.rollouts.sampling import Sampling
from whet.rollouts.thinking import opening, parted, sample_reply

Schemas = list[dict[str, Any]]  # of tools, as chat templates take them
USED_UP = "the episode has used up its"


class LimitReached(Exception):
    """A budget of the episode is used up. Not an error: the episode ends here, truncated."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"{USED_UP} {limit}")
        self.limit = limit  # reply, turns, tokens or seconds


class PromptTooLong(DataError):
    """The first prompt of an episode is longer than it may be."""


@dataclass(slots=True, frozen=True)
class Reply:
    """What the model said."""

    message: Message
    prompt: list[int]  # the tokens before it
    completion: Completion


@dataclass(slots=True)
class Recording:
    """What all lines of one episode share."""

    generator: Generator
    renderer: Renderer
    sampling: Sampling
    name: str
    seed: int
    timing: Timing = field(default_factory=Timing)
    usage: Usage = field(default_factory=Usage)
    lines: "list[Session]" = field(default_factory=list)
    shortens: bool = True  # what is said between two replies; a program's words are taken whole or not at all
    started: float = field(default_factory=time.monotonic)

    @contextlib.asynccontextmanager
    async def clock(self) -> AsyncIterator[None]:
        """Raise ``LimitReached`` in what runs inside when the episode's time is over."""
        self.usage.seconds, seconds = time.monotonic() - self.started, self.sampling.max_seconds
        left = None if seconds is None else seconds - self.usage.seconds
        if left is not None and left <= 0:
            raise LimitReached("seconds")
        limit = asyncio.timeout(left)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise LimitReached("seconds") from None
            raise
        finally:
            self.usage.seconds = time.monotonic() - self.started

    @property
    def branches(self) -> list[Trajectory]:
        """The lines in which the model said something."""
        spoken = [line for line in self.lines if any(span.trained for span in line.spans)]
        return [Trajectory(line.spans, line.messages, line._tools) for line in spoken]


class Session:
    """One line of a conversation being written.

    >>> session = Session(Recording(generator, renderer, sampling, name="gsm8k/1", seed=0))
    >>> reply = await session.reply([{"role": "user", "content": "2 + 2?"}])
    >>> session.spans  # the question's tokens, and the reply's with their log-probs
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.messages: list[Message] = []  # as the model saw them
        self.spans: list[Span] = []
        self.ends: list[tuple[int, int]] = []  # after each reply: the number of messages, and of spans
        self._given: list[Message] = []  # as they were given, where an observation was shortened
        self._tools: Schemas | None = None
        self._busy = asyncio.Lock()
        recording.lines.append(self)

    def extended_by(self, messages: Sequence[Message], tools: Schemas | None = None) -> bool:
        """Return whether the messages begin with all that this line holds, and go on with something new."""
        return self.in_common(messages, tools) == len(self._given) < len(messages)

    async def reply(self, messages: Sequence[Message], tools: Schemas | None = None, limit: int | None = None) -> Reply:
        """Sample the reply to a conversation, given as a whole, of at most ``limit`` tokens. Only what is new is
        rendered. Raises ``DataError`` where it doesn't extend this line, ``PromptTooLong``, and ``LimitReached`` where
        a budget of the episode is used up."""
        async with self._busy, self.recording.clock():
            if not self.extended_by(messages, tools):
                raise DataError(
                    f"{self.recording.name}: the conversation does not go on from what the model has seen; a history "
                    "that is rewritten needs a branch of its own (Session.branch)"
                )
            return await self._reply(messages[len(self._given) :], tools, limit)

    def branch(self, messages: Sequence[Message], tools: Schemas | None = None) -> Self:
        """Begin another line of the same episode, for messages that don't extend this one. The tokens up to the last
        reply that both have in common are kept; there they are context, and not trained again."""
        line = type(self)(self.recording)
        common = self.in_common(messages, tools)
        for count, spans in self.ends:
            if count <= common and count < len(messages):
                line.messages, line._given = self.messages[:count], self._given[:count]
                line.spans = [replace(span, trained=False, reward=0.0) for span in self.spans[:spans]]
                line.ends.append((count, spans))
                line._tools = tools
        return line

    def earn(self, reward: float) -> None:
        """Credit the last reply."""
        self.spans[-1].reward += reward

    @property
    def tokens(self) -> list[int]:
        """All tokens of this line."""
        return [token for span in self.spans for token in span.tokens]

    def in_common(self, messages: Sequence[Message], tools: Schemas | None) -> int:
        """Return the number of messages at the start that are those of this line."""
        if self._given and (tools or None) != (self._tools or None):
            return 0
        pairs = zip(self._given, messages, strict=False)
        return next((i for i, (ours, other) in enumerate(pairs) if not _same(ours, other)), len(self._given))

    async def _reply(self, new: Sequence[Message], tools: Schemas | None, limit: int | None) -> Reply:
        recording = self.recording
        renderer, sampling, usage = recording.renderer, recording.sampling, recording.usage
        if usage.turns >= sampling.max_turns:
            raise LimitReached("turns")
        history = self.tokens
        added, shown = self._following(new, history) if history else (self._prompt(new, tools), list(new))
        opened = opening([*history, *added], renderer, sampling)
        added += opened
        history += added
        if len(history) >= sampling.longest:
            raise LimitReached("tokens")
        params = sampling.params(derive_seed(recording.seed, usage.turns), renderer.stop_token_ids, len(history))
        if limit is not None:
            params = replace(params, max_new_tokens=min(limit, params.max_new_tokens))
        usage.turns += 1

        async def sample(history: list[int], params: SamplingParams) -> Completion:
            return await recording.generator.sample(history, params, recording.name)

        with recording.timing.waiting_for_generator():
            spans, completion = await sample_reply(sample, history, params, renderer, sampling.thinking_budget)
        usage.prompt_tokens += len(history)
        usage.cached_tokens += completion.cached
        usage.cut_thoughts += any(not span.trained for span in spans)
        message = renderer.parse_reply([*opened, *(token for span in spans for token in span.tokens)], tools)
        if sampling.thinking is not None or sampling.thinking_budget is not None:
            message = parted(message)
        for call in message.get("tool_calls", ()):
            call["id"] = call_id(usage.tool_calls)  # unique in the episode: programs pair calls and results by it
            usage.tool_calls += 1
        self._tools = tools
        self._given += [*new, message]
        self.messages += [*shown, message]
        self.spans += [Span(added, False), *spans]
        if completion.experts is not None:
            fill_missing(self.spans, completion.experts)
        self.ends.append((len(self._given), len(self.spans)))
        return Reply(message, history, completion)

    def _prompt(self, messages: Sequence[Message], tools: Schemas | None) -> list[int]:
        recording, renderer = self.recording, self.recording.renderer
        most, tokens = recording.sampling.max_prompt_tokens, None
        if not renderer.longer_than(most, messages, tools):
            if tools:
                renderer.check_tools()
            tokens = renderer.render_prompt(messages, tools)
            if len(tokens) <= most:
                return tokens
        if recording.usage.turns:  # a history that an agent has rewritten
            raise LimitReached("tokens")
        raise PromptTooLong(
            f"{recording.name}: the prompt has {len(tokens) if tokens else f'over {most}'} tokens, more than "
            f"sampling.max_prompt_tokens = {most}; raise it or leave the task out"
        )

    def _following(self, new: Sequence[Message], history: list[int]) -> tuple[list[int], list[Message]]:
        """The tokens that new messages add, and the messages as they are shown."""
        renderer, sampling = self.recording.renderer, self.recording.sampling
        if not self.recording.shortens:
            if renderer.longer_than(sampling.longest - len(history), new):
                raise LimitReached("tokens")
            return renderer.render_next(history, new), list(new)
        fitting = shorten(new, history, renderer, sampling.max_observation_tokens)
        if fitting is None:
            raise LimitReached("tokens")
        return fitting


def _same(ours: Message, other: Message) -> bool:
    """Return whether two messages say the same. A reply that is sent back may lack its thoughts, and have other white
    space around it and other ids of its calls."""
    if ours["role"] != "assistant" or other["role"] != "assistant":
        return ours == other
    thought = other.get("reasoning_content")
    return (
        ours["content"].strip() == other["content"].strip()
        and [call["function"] for call in ours.get("tool_calls", ())]
        == [call["function"] for call in other.get("tool_calls", ())]
        and (thought is None or thought == ours.get("reasoning_content"))
    )
