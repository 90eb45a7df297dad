"""The plain data that flows from data sets and environments to the learner. Needs no torch, model or device.

Each attempt at a ``Task`` is an ``Episode``, whose branches are ``Trajectory``s made of ``Span``s of tokens; the
episodes of one task form a ``Group``. Nearly every episode has one branch; an agent that rewrites its history, or holds
a second conversation in parallel, produces several. A row for supervised fine-tuning is a group of one, a preference
pair a group of two, and GRPO's samples a group of G, so every objective reads the same columns.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, Generic, Literal, NotRequired

from pydantic import BaseModel
from typing_extensions import TypedDict, TypeVar  # pydantic reads no other TypedDict before Python 3.12

from whet.base.errors import DataError
from whet.base.strict_json import JsonObject
from whet.core.content import Content

D = TypeVar("D", default=Any)  # the data of a task

Weighting = Literal["token", "sequence", "group", "constant"]  # see ``whet.core.weighting``


class FunctionCall(TypedDict):
    """A function call by a model. The arguments are an object, as chat templates expect them."""

    name: str
    arguments: JsonObject


class ToolCall(TypedDict):
    """A call in the nested format of the OpenAI API. The id is unique within its episode."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """One chat message, in the format that chat templates expect."""

    role: str
    content: Content  # a text in what a model says
    reasoning_content: NotRequired[str]  # the model's reasoning before its answer
    tool_calls: NotRequired[list[ToolCall]]
    malformed_calls: NotRequired[list[str]]  # why parts of the content that look like calls are not valid
    name: NotRequired[str]  # the tool's name, in a tool result
    tool_call_id: NotRequired[str]  # the call that this message is the result of


class Status(StrEnum):
    """The way an episode ended."""

    COMPLETED = "completed"  # the model or the environment ended it
    TRUNCATED = "truncated"  # it exhausted a budget: length, turns, time
    FAILED = "failed"  # infrastructure failed; it has no reward and must never be trained on


@dataclass(slots=True, frozen=True)
class Distribution:
    """The settings that turn logits into the sampling distribution. The learner computes log-probs under the same."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(slots=True)
class Task(Generic[D]):
    """One problem of a task set. Its ``data`` is for the grader: a frozen data class, a pydantic model or a dict, whose
    values JSON can hold."""

    uid: str  # stable across runs and unique in its set, e.g. "gsm8k/train/17"
    prompt: list[Message]
    data: D = field(default_factory=dict)  # type: ignore[assignment]  # a task without data
    environment: str = ""  # the name of its part in a blend or mixture

    @property
    def columns(self) -> dict[str, object]:
        """The data by name, for readers that get a name from a setting or from a row. Fields of a class that are None
        are left out. Raises ``DataError`` for data without names."""
        data: object = self.data
        if isinstance(data, dict):
            return dict(data)
        if is_dataclass(data) and not isinstance(data, type):
            return {each.name: value for each in fields(data) if (value := getattr(data, each.name)) is not None}
        if isinstance(data, BaseModel):
            return {name: value for name, value in data if value is not None}
        raise DataError(
            f"task {self.uid!r}: its data must be a dict, a data class or a pydantic model, not {data!r:.80}"
        )


@dataclass(slots=True)
class Span:
    """The tokens that one message adds to a trajectory. Tokens and log-probs are kept as 32-bit numbers: 8 bytes for a
    token, where lists of Python numbers take 76."""

    tokens: Sequence[int]
    trained: bool
    logprobs: Sequence[float] | None = None  # [len(tokens)]; present exactly if the policy sampled the tokens
    versions: tuple[int, int] | None = None  # oldest and newest weights that sampled the tokens
    reward: float = 0.0  # the environment's reward for this reply, included in the episode's
    experts: str | None = None  # the generator's expert ids, if recorded; see whet.core.expert_ids

    def __post_init__(self) -> None:
        self.tokens = array("i", self.tokens)
        if self.logprobs is not None:
            self.logprobs = array("f", self.logprobs)


@dataclass(slots=True)
class Trajectory:
    """One branch of a conversation, or one row of a data set. The model saw its spans' tokens, concatenated."""

    spans: list[Span]
    messages: list[Message] = field(default_factory=list)  # the same as text, for people and group graders
    tools: list[JsonObject] | None = None  # JSON schemas of the tools in the prompt
    role: str = ""  # the seat that the policy played, in an episode of several roles

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
    """Resources that an episode used, over all its branches."""

    turns: int = 0  # replies
    tool_calls: int = 0
    cut_thoughts: int = 0  # replies whose reasoning was ended by a budget
    prompt_tokens: int = 0  # sent to the generator, counted again each turn
    cached_tokens: int = field(default=0, compare=False)  # prompt tokens found in the prefix cache
    seconds: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class Episode:
    """One attempt at a task. Its branches share one reward and count as one answer. In an episode of several roles this
    holds for each role, and the branches of a role follow each other."""

    branches: list[Trajectory]
    reward: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)  # named reward components and diagnostics
    status: Status = Status.COMPLETED
    usage: Usage = field(default_factory=Usage)
    limit: str | None = None  # the exhausted budget, if TRUNCATED
    error: str | None = None  # the reason, if FAILED
    rewards: dict[str, float] = field(default_factory=dict)  # by role, if there are roles; ``reward`` is their mean

    def to_json(self) -> dict[str, object]:
        """Return the episode as values that JSON can hold."""
        return asdict(self, dict_factory=_with_lists)

    @classmethod
    def from_json(cls, saved: JsonObject) -> "Episode":
        """Return the episode that ``to_json`` saved, with or without a round trip through JSON."""

        def span(saved: JsonObject) -> Span:
            return Span(**(saved | {"versions": saved["versions"] and tuple(saved["versions"])}))

        def branch(saved: JsonObject) -> Trajectory:
            return Trajectory(
                [span(item) for item in saved["spans"]], saved["messages"], saved.get("tools"), saved.get("role", "")
            )

        branches = [branch(item) for item in saved["branches"]]
        changes = {"branches": branches, "status": Status(saved["status"]), "usage": Usage(**saved["usage"])}
        return cls(**(saved | changes))

    def reward_of(self, role: str) -> float:
        """Return the reward of a role; the episode's if there are no roles."""
        return self.rewards.get(role, self.reward)

    @property
    def branches_or_empty(self) -> list[Trajectory]:
        """The branches, or one empty branch if a budget was exhausted before the first reply: it counts as well."""
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
        """The branches of all episodes, in the order of a batch's sequences."""
        return [branch for episode in self.episodes for branch in episode.branches_or_empty]

    @property
    def trained_tokens(self) -> int:
        """The number of sampled tokens of all episodes."""
        return sum(episode.trained_tokens for episode in self.episodes)

    @property
    def rewards_by_role(self) -> dict[str, list[float]]:
        """The rewards of all episodes by role. Without roles, the only role is empty."""
        rewards: dict[str, list[float]] = {}
        for episode in self.episodes:
            for role, reward in (episode.rewards or {"": episode.reward}).items():
                rewards.setdefault(role, []).append(reward)
        return rewards

    def of_roles(self, plays: Callable[[str], bool]) -> "Group":
        """Return the group with what the roles did for which ``plays`` is true: their branches and rewards. Episodes in
        which none of them replied are left out; one that ended before any reply is that of the role without a name.
        ``Episode.reward`` stays the mean over all roles."""
        episodes = []
        for episode in self.episodes:
            branches = [branch for branch in episode.branches if plays(branch.role)]
            if branches or (not episode.branches and plays("")):
                rewards = {role: reward for role, reward in episode.rewards.items() if plays(role)}
                episodes.append(replace(episode, branches=branches, rewards=rewards))
        return replace(self, episodes=episodes)


def _with_lists(items: list[tuple[str, object]]) -> dict[str, object]:
    return {name: value.tolist() if isinstance(value, array) else value for name, value in items}
