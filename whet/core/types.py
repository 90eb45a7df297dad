"""The plain data that flows from data sets and environments to the learner. Needs no torch, model or device.

A ``Task`` is posed; each attempt at it is an ``Episode``, whose branches are ``Trajectory``s made of ``Span``s of
tokens; the episodes of one task form a ``Group``. Nearly every episode has one branch: an agent that rewrites its
history, or has a second conversation beside the first, leaves several. A row for supervised fine-tuning is a group of
one, a preference pair a group of two, GRPO's samples a group of G: every objective reads the same columns.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

Weighting = Literal["token", "sequence", "group", "constant"]  # how a token's share of a step is counted


class FunctionCall(TypedDict):
    """A function that a model wants to be called. The arguments are an object, as chat templates take them."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """A call in the nested form of the OpenAI API. The id is unique within its episode."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """One chat message, in the form chat templates expect."""

    role: str
    content: str
    reasoning_content: NotRequired[str]  # what a model thought before it answered
    tool_calls: NotRequired[list[ToolCall]]
    malformed_calls: NotRequired[list[str]]  # why parts of the content that look like calls are none
    name: NotRequired[str]  # of the tool, in its result
    tool_call_id: NotRequired[str]  # of the call that this is the result of


class Status(StrEnum):
    """The end of an episode."""

    COMPLETED = "completed"  # the model or the environment ended it
    TRUNCATED = "truncated"  # it used up a budget: length, turns, time
    FAILED = "failed"  # infrastructure failed; carries no reward and must never be trained on


@dataclass(slots=True, frozen=True)
class Distribution:
    """The settings that turn logits into the sampled distribution. The learner takes log-probs under the same one."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(slots=True)
class Task:
    """One problem of a task set."""

    uid: str  # stable across runs and unique in its set, e.g. "gsm8k/train/17"
    prompt: list[Message]
    data: dict[str, Any] = field(default_factory=dict)  # what grading needs (JSON values only)
    environment: str = ""  # its name in a blend of several


@dataclass(slots=True)
class Span:
    """The tokens that one message adds to a trajectory."""

    tokens: list[int]
    trained: bool
    logprobs: list[float] | None = None  # [len(tokens)]; present exactly when our policy sampled them
    versions: tuple[int, int] | None = None  # oldest and newest weights that sampled them
    reward: float = 0.0  # the environment's for this reply; part of the episode's
    experts: str | None = None  # that each token went to in the generator, where it was asked; see whet.core.expert_ids


@dataclass(slots=True)
class Trajectory:
    """One line of conversation, or one row of a data set: its spans' tokens concatenated are what the model saw."""

    spans: list[Span]
    messages: list[Message] = field(default_factory=list)  # the same in text, for people and group graders
    tools: list[dict[str, Any]] | None = None  # JSON schemas, that the model was told of

    @property
    def tokens(self) -> list[int]:
        """All tokens in order."""
        return [token for span in self.spans for token in span.tokens]

    @property
    def trained_tokens(self) -> int:
        """The number of trained tokens."""
        return sum(len(span.tokens) for span in self.spans if span.trained)


@dataclass(slots=True)
class Usage:
    """What an episode took, over all its branches."""

    turns: int = 0  # replies
    tool_calls: int = 0
    cut_thoughts: int = 0  # replies whose thoughts a budget ended
    prompt_tokens: int = 0  # that the generator was given, each turn anew
    cached_tokens: int = field(default=0, compare=False)  # of these, known to it already
    seconds: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class Episode:
    """One attempt at a task. Its branches share the reward and count as one answer."""

    branches: list[Trajectory]
    reward: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)  # named reward components and diagnostics
    status: Status = Status.COMPLETED
    usage: Usage = field(default_factory=Usage)
    limit: str | None = None  # the budget that was used up, when status is TRUNCATED
    error: str | None = None  # why, when status is FAILED

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Episode":
        """Return the episode of which ``saved`` is ``dataclasses.asdict``, also after a way through JSON."""

        def span(saved: dict[str, Any]) -> Span:
            return Span(**(saved | {"versions": saved["versions"] and tuple(saved["versions"])}))

        def branch(saved: dict[str, Any]) -> Trajectory:
            return Trajectory([span(one) for one in saved["spans"]], saved["messages"], saved.get("tools"))

        branches = [branch(one) for one in saved["branches"]]
        changes = {"branches": branches, "status": Status(saved["status"]), "usage": Usage(**saved["usage"])}
        return cls(**(saved | changes))

    @property
    def lines(self) -> list[Trajectory]:
        """Its branches; an empty one where a budget was used up before the first reply, for that counts, too."""
        return self.branches or [Trajectory([])]

    @property
    def messages(self) -> list[Message]:
        """The conversation in which the episode ended."""
        return self.branches[-1].messages if self.branches else []

    @property
    def spans(self) -> list[Span]:
        """The spans of all branches, in order."""
        return [span for branch in self.branches for span in branch.spans]

    @property
    def trained_tokens(self) -> int:
        """The number of trained tokens."""
        return sum(branch.trained_tokens for branch in self.branches)


@dataclass(slots=True)
class Group:
    """All episodes of one task in one step."""

    uid: str  # unique within a run, also when the same task is drawn twice
    task: Task
    episodes: list[Episode]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The lines of all episodes, in the order of a batch's sequences."""
        return [line for episode in self.episodes for line in episode.lines]
