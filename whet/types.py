"""The plain data that flows from data sets and environments to the learner. Needs no torch, model or device.

A ``Task`` is posed; the answers to it are ``Trajectory``s made of ``Span``s of tokens; the trajectories of one task
form a ``Group``. A row for supervised fine-tuning is a group of one, a preference pair a group of two, GRPO's
samples a group of G: every objective reads the same columns.
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
    """A call in the nested form of the OpenAI API. The id is unique within its message."""

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
    TRUNCATED = "truncated"  # it ran into the length or turn limit
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


@dataclass(slots=True)
class Span:
    """The tokens that one message adds to a trajectory."""

    tokens: list[int]
    trained: bool
    logprobs: list[float] | None = None  # [len(tokens)]; present exactly when our policy sampled them
    versions: tuple[int, int] | None = None  # oldest and newest weights that sampled them


@dataclass(slots=True)
class Trajectory:
    """One answer, or one row of a data set: spans in order; their tokens concatenated are what the model saw."""

    spans: list[Span]
    reward: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)  # named reward components and diagnostics
    status: Status = Status.COMPLETED
    messages: list[Message] = field(default_factory=list)  # the same in text, for people and group graders
    error: str | None = None  # why, when status is FAILED

    @property
    def tokens(self) -> list[int]:
        """All tokens in order."""
        return [token for span in self.spans for token in span.tokens]

    @property
    def trained_tokens(self) -> int:
        """The number of trained tokens."""
        return sum(len(span.tokens) for span in self.spans if span.trained)


@dataclass(slots=True)
class Group:
    """All trajectories of one task in one step."""

    uid: str  # unique within a run, also when the same task is drawn twice
    task: Task
    trajectories: list[Trajectory]
