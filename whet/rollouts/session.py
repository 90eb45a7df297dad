"""The recording of a conversation between the model and the driver of an episode, as the tokens that the model saw.

    environment ──► run_episode ─┐                    ┌─► renderer: messages <-> tokens
                                 ├─► Session.reply ───┤
    agent ──HTTP──► endpoint ────┘                    └─► generator: tokens -> tokens

Tokens are only appended: sampled tokens are never decoded and encoded again. If a history is rewritten, a new branch
begins. All branches of an episode share its budgets. Independent of environments, groups and the learner.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from whet.base.errors import DataError
from whet.base.seeds import derive_seed
from whet.chat.calls import call_id, counted
from whet.chat.renderer import Renderer, check_images
from whet.chat.thinking import split_thinking
from whet.core.content import image_urls, in_text, text_of
from whet.core.expert_ids import fill_missing
from whet.core.types import Message, Span, Trajectory, Usage
from whet.engines.base import Completion, Engine
from whet.metrics.clock import Timing
from whet.rollouts.observation import shorten
from whet.rollouts.sampling import Sampling
from whet.rollouts.thinking import opening, sample_reply
from whet.rollouts.watched import Watch, sampler, watched

Schemas = list[dict[str, Any]]  # of tools, as chat templates take them
USED_UP = "the episode has used up its"


class LimitReached(Exception):
    """A budget of the episode is used up. This is not an error: the episode ends here, truncated."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"{USED_UP} {limit}")
        self.limit = limit  # reply, turns, tokens, total_tokens or seconds


class PromptTooLong(DataError):
    """The first prompt of an episode is too long."""


@dataclass(slots=True, frozen=True)
class Reply:
    """A reply of the model."""

    message: Message
    prompt: list[int]  # the tokens before it
    completion: Completion


@dataclass(slots=True, frozen=True)
class Player:
    """A model that replies: its generator, and the renderer of its tokens."""

    generator: Engine[object]
    renderer: Renderer


Cast = Mapping[str, Player]  # the players of roles by their names
NO_CAST: Cast = MappingProxyType({})  # one model plays all roles


@dataclass(slots=True)
class Recording:
    """The state that all branches of one episode share. ``generator`` replies, and ``renderer`` renders, for each role
    that has no player in ``cast``."""

    generator: Engine[object]
    renderer: Renderer
    sampling: Sampling
    name: str
    seed: int
    timing: Timing = field(default_factory=Timing)
    usage: Usage = field(default_factory=Usage)
    branches: "list[Session]" = field(default_factory=list)
    call_ids: set[str] = field(default_factory=set)
    cast: Cast = field(default_factory=dict)
    shortens: bool = True  # messages between two replies; a program's messages are never shortened
    started: float = field(default_factory=time.monotonic)

    def begin(self, role: str = "") -> "Session":
        """Return a new branch, in which the player of a role replies."""
        return Session(self, role)

    @contextlib.asynccontextmanager
    async def clock(self) -> AsyncIterator[None]:
        """Raise ``LimitReached`` in the block when the episode's time is up."""
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
    def room(self) -> int | None:
        """The number of tokens that all branches together may still get, without what calls in flight may take."""
        most = self.sampling.max_total_tokens
        return None if most is None else most - sum(branch.taken for branch in self.branches)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The branches with at least one reply."""
        replied = [branch for branch in self.branches if branch.replied]
        return [Trajectory(branch.spans, branch.messages, branch._tools, branch.role) for branch in replied]


class Session:
    """One branch of a conversation, while it is recorded.

    >>> session = Session(Recording(generator, renderer, sampling, name="gsm8k/1", seed=0))
    >>> reply = await session.reply([{"role": "user", "content": "2 + 2?"}])
    >>> session.spans  # the question's tokens, and the reply's with their log-probs
    """

    def __init__(self, recording: Recording, role: str = "") -> None:
        self.recording, self.role = recording, role
        self.messages: list[Message] = []  # as the model saw them, possibly shortened
        self.spans: list[Span] = []
        self.ends: list[tuple[int, int]] = []  # after each reply: the number of messages, and of spans
        self._original: list[Message] = []  # as passed by the caller, not shortened
        self._claimed = 0  # tokens that this branch will have at most after the reply in flight
        self._tools: Schemas | None = None
        self._busy = asyncio.Lock()
        recording.branches.append(self)

    def extended_by(self, messages: Sequence[Message], tools: Schemas | None = None) -> bool:
        """Return whether the messages start with all messages of this branch and continue them."""
        return self.common_prefix_length(messages, tools) == len(self._original) < len(messages)

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Schemas | None = None,
        limit: int | None = None,
        watch: Watch | None = None,
    ) -> Reply:
        """Sample the reply to a conversation, of at most ``limit`` tokens. ``messages`` is the whole conversation, of
        which only the new messages are rendered. ``watch`` is called while the reply is sampled, if the engine hands
        out tokens. Raises ``DataError`` if it doesn't extend this branch,
        ``PromptTooLong``, and ``LimitReached`` if a budget of the episode is used up."""
        check_images(self.player.renderer, messages, f" of {self.recording.name}")
        async with self._busy, self.recording.clock():
            if not self.extended_by(messages, tools):
                raise DataError(
                    f"{self.recording.name}: the conversation does not continue what the model has seen; a rewritten "
                    "history needs a new branch (Session.branch)"
                )
            try:
                return await self._reply(messages[len(self._original) :], tools, limit, watch)
            finally:
                self._claimed = 0

    def branch(self, messages: Sequence[Message], tools: Schemas | None = None) -> Self:
        """Start a new branch of the same episode, for messages that don't extend this one. It keeps the tokens up to
        the last reply that both have in common, as context that is not trained again."""
        branch = type(self)(self.recording, self.role)
        common = self.common_prefix_length(messages, tools)
        for count, spans in self.ends:
            if count <= common and count < len(messages):
                branch.messages, branch._original = self.messages[:count], self._original[:count]
                branch.spans = [replace(span, trained=False, reward=0.0) for span in self.spans[:spans]]
                branch.ends.append((count, spans))
                branch._tools = tools
        return branch

    def earn(self, reward: float) -> None:
        """Add a reward to the last reply."""
        self.spans[-1].reward += reward

    @property
    def player(self) -> Player:
        """The model that replies in this branch."""
        recording = self.recording
        return recording.cast.get(self.role) or Player(recording.generator, recording.renderer)

    @property
    def tokens(self) -> list[int]:
        """All tokens of this branch."""
        tokens = list[int]()
        for span in self.spans:
            tokens += span.tokens
        return tokens

    @property
    def replied(self) -> bool:
        """True if a reply was sampled in this branch."""
        return any(span.trained for span in self.spans)

    @property
    def taken(self) -> int:
        """The number of tokens of this branch with what the reply in flight may add; 0 if it has no reply."""
        return max(self._claimed, sum(len(span.tokens) for span in self.spans) if self.replied else 0)

    def common_prefix_length(self, messages: Sequence[Message], tools: Schemas | None) -> int:
        """Return the number of messages at the start that equal the messages of this branch."""
        if self._original and (tools or None) != (self._tools or None):
            return 0
        pairs = zip(self._original, messages, strict=False)
        return next((i for i, (ours, other) in enumerate(pairs) if not _same(ours, other)), len(self._original))

    async def _reply(
        self, new: Sequence[Message], tools: Schemas | None, limit: int | None, watch: Watch | None
    ) -> Reply:
        recording = self.recording
        player, sampling, usage = self.player, recording.sampling, recording.usage
        renderer = player.renderer
        if usage.turns >= sampling.max_turns:
            raise LimitReached("turns")
        history = self.tokens
        added, shown = self._following(new, history) if history else (self._prompt(new, tools), list(new))
        history += added
        opened = opening(history, renderer, sampling)
        added += opened
        history += opened
        if len(history) >= sampling.longest:
            raise LimitReached("tokens")
        params = sampling.params(derive_seed(recording.seed, usage.turns), renderer.stop_token_ids, len(history))
        if limit is not None:
            params = replace(params, max_new_tokens=min(limit, params.max_new_tokens))
        if (room := recording.room) is not None:
            room += self.taken - len(history)
            if room <= 0:
                raise LimitReached("total_tokens")
            params = replace(params, max_new_tokens=min(room, params.max_new_tokens))
            self._claimed = len(history) + params.max_new_tokens
        if urls := image_urls([*self.messages, *shown]):
            params = replace(params, images=tuple(urls))
        usage.turns += 1

        engine, name = player.generator, recording.name
        if watch is None:
            sample = sampler(engine, name)
        else:
            sample = watched(engine, name, renderer, sampling, history, opened, watch)
        with recording.timing.waiting_for_generator():
            spans, completion = await sample_reply(sample, history, params, renderer, sampling.thinking_budget)
        usage.prompt_tokens += len(history)
        usage.cached_tokens += completion.cached
        usage.cut_thoughts += any(not span.trained for span in spans)
        message = renderer.parse_reply([*opened, *(token for span in spans for token in span.tokens)], tools)
        if sampling.controls_thinking:
            message = split_thinking(message)
        for call in message.get("tool_calls", ()):  # unique in the episode: programs match results to calls by id
            if counted(call["id"]) is not None or call["id"] in recording.call_ids:
                call["id"] = call_id(usage.tool_calls)
            recording.call_ids.add(call["id"])
            usage.tool_calls += 1
        self._tools = tools
        self._original += [*new, message]
        self.messages += [*shown, message]
        self.spans += [Span(added, False), *spans]
        if completion.experts is not None:
            fill_missing(self.spans, completion.experts)
        self.ends.append((len(self._original), len(self.spans)))
        return Reply(message, history, completion)

    def _prompt(self, messages: Sequence[Message], tools: Schemas | None) -> list[int]:
        recording, renderer = self.recording, self.player.renderer
        most, tokens = recording.sampling.max_prompt_tokens, None
        if not renderer.longer_than(most, messages, tools):
            if tools:
                renderer.check_tools()
            tokens = renderer.render_prompt(messages, tools)
            if len(tokens) <= most:
                return tokens
        if recording.usage.turns:  # a history that an agent has rewritten
            raise LimitReached("tokens")
        described = f" with {len(tools)} tool{'s' * (len(tools) > 1)} described" if tools else ""
        count = len(tokens) if tokens else f"over {most}"
        raise PromptTooLong(
            f"{recording.name}: the prompt{described} has {count} tokens, more than "
            f"sampling.max_prompt_tokens = {most}; raise it or leave the task out"
        )

    def _following(self, new: Sequence[Message], history: list[int]) -> tuple[list[int], list[Message]]:
        """Return the tokens that new messages add, and the messages as the model sees them."""
        renderer, sampling = self.player.renderer, self.recording.sampling
        if not self.recording.shortens:
            if renderer.longer_than(sampling.longest - len(history), new):
                raise LimitReached("tokens")
            return renderer.render_next(history, new), list(new)
        images = () if renderer.images is None else map(renderer.images.tokens, image_urls(new))
        fitting = shorten(new, history, renderer, sampling.max_observation_tokens + sum(map(len, images)))
        if fitting is None:
            raise LimitReached("tokens")
        return fitting


def _same(ours: Message, other: Message) -> bool:
    """Return whether two messages are equal. A reply that is sent back may lack its thoughts, and may differ in
    surrounding white space and in the ids of its calls."""
    if ours is other:
        return True  # most of a long conversation
    if image_urls([ours, other]):
        return ours == other
    [ours, other] = in_text([ours, other])
    if ours["role"] != "assistant" or other["role"] != "assistant":
        return ours == other
    thought = other.get("reasoning_content")
    return (
        text_of(ours["content"]).strip() == text_of(other["content"]).strip()
        and [call["function"] for call in ours.get("tool_calls", ())]
        == [call["function"] for call in other.get("tool_calls", ())]
        and (thought is None or thought == ours.get("reasoning_content"))
    )
