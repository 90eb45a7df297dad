"""The interfaces of task sets and environments. A ``TaskSet`` is a config that returns tasks. Its ``open`` returns
``Environments``, which make one ``Environment`` for each episode.

Environments exchange messages with the model: they have no access to tokens, models or torch.

Base classes of task sets:

    TaskSet           tasks of any origin, with ``grade`` for single replies or ``make`` for longer episodes
    SplitTasks        both splits made together (``splits.py``; ``DrawnTasks`` from a seed, ``FileTasks`` from rows)
    SourcedTasks      rows of a file or, without one, tasks drawn from a seed (``task_source.py``)
    BoxedProblems     questions with a mathematical answer (``problems.py``)
    ToolTasks         tasks that are solved by calling tools (``tools/base.py``; ``SeededToolTasks`` from a seed)
    UserTasks         tool tasks with a simulated user as the other party (``users/base.py``)
    WrappedTaskSet    the tasks of another task set, with other episodes or rewards (``wrapped.py``; ``Rewarded``)
"""

import contextlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Generic, Protocol, TypeVar, TypeVarTuple, overload, runtime_checkable

from whet.base.errors import ConfigError, DataError
from whet.base.strict_json import JsonObject
from whet.config.entry_points import EntryPoints
from whet.core.types import D, Group, Message, Task
from whet.data.base import Data
from whet.processes.user_code import check_ran, place_of
from whet.tasks.cases import Answer, Case
from whet.tasks.scores import NamedScores

TASK_SETS = EntryPoints("whet.task_sets")
"""The task sets that a recipe can name: the built-in task sets, and task sets of installed distributions."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MORE_REPLIES = "{} has episodes of several turns or with tools, but a judge only grades single answers"

AskPolicy = Callable[[str], Coroutine[Any, Any, tuple[int, str]]]
"""Answers the JSON of a request of OpenAI's chat API by the policy, with the HTTP status and the JSON of the answer.
Raises the errors of its generator."""

Grade = Mapping[str, float] | float
"""Scores including ``"reward"``, or the reward alone; a bool is the reward and whether the answer is right."""


@dataclass(slots=True)
class Observation:
    """The first messages for the model."""

    messages: list[Message]
    tools: list[JsonObject] | None = None  # JSON schemas for the chat template
    role: str = ""  # the role that replies first, in an episode of several roles


@dataclass(slots=True)
class Step:
    """The environment's response to one reply."""

    reward: float = 0.0  # added to the episode's reward
    done: bool = None  # type: ignore[assignment]  # by default: whether there are no messages
    messages: list[Message] = field(default_factory=list)  # what the model has not seen yet, if not done
    scores: dict[str, float] = field(default_factory=dict)  # named metrics, merged into the episode's scores
    rewards: dict[str, float] = field(default_factory=dict)  # with several roles: what each earned, instead of reward
    role: str | None = None  # the role that gets the messages and replies next; None: the same role

    def __post_init__(self) -> None:
        if self.done is None:
            self.done = not self.messages
        if not isinstance(self.scores, dict):
            raise DataError(f"the scores of a step are {self.scores!r:.80}; they must be a dict of numbers by name")
        if "reward" in self.scores:
            raise DataError("a step has 'reward' among its scores, which are metrics only: use Step(reward=...)")


@runtime_checkable
class Environment(Protocol):
    """One episode; also a base class with a ``close`` that does nothing. An exception is an infrastructure failure,
    never a reward: a bad reply is a step with a low reward."""

    @abstractmethod
    async def start(self) -> Observation:
        """Return the first messages for the model. Called once."""

    @abstractmethod
    async def step(self, reply: Message) -> Step:
        """Return the reward and scores of a reply and, if the episode continues, the next messages."""

    async def close(self) -> None:
        """Release the episode's resources. Called once at the end, also after an exception and before the first step.
        By default nothing."""
        return


@dataclass(slots=True, frozen=True)
class Address:
    """The address of the model for a client of OpenAI's API."""

    base_url: str
    api_key: str


@runtime_checkable
class Program(Protocol):
    """One episode that calls the model itself; also a base class, whose ``close`` does nothing. An exception is an
    infrastructure failure, never a reward."""

    @abstractmethod
    async def run(self, address: Address) -> Step:
        """Do the task with the model at ``address``, and return the reward and scores of the episode."""

    async def close(self) -> None:
        """Release the episode's resources. Called once at the end, also after an exception. By default nothing."""
        return


@overload
async def called(call: Callable[[*Ts], Coroutine[object, object, T]], *args: *Ts) -> T: ...
@overload
async def called(call: Callable[[*Ts], T | Awaitable[T]], *args: *Ts) -> T: ...
async def called(call: Callable[[*Ts], T | Awaitable[T]], *args: *Ts) -> T:
    """Return ``call(*args)`` of a user's function, awaited if the function is ``async``. Raises ``ConfigError`` for a
    function that contains ``yield``."""
    result = call(*args)
    check_ran(result)
    return await result if inspect.isawaitable(result) else result


def is_bool(value: object) -> bool:
    """Return whether the value is a bool of Python or of numpy, which is not a ``Real``."""
    return type(value).__name__ in ("bool", "bool_")


def finite(value: Any, what: str) -> float:
    """Return the value as a float. Raises ``DataError`` for anything that is not a finite number: a broken grader is
    never a reward of zero."""
    if isinstance(value, Real) or is_bool(value):
        with contextlib.suppress(OverflowError):  # a whole number larger than any float
            number = float(value)
            if math.isfinite(number):
                return number
    shown = repr(value)
    hint = ": return its .item()" if type(value).__name__ in ("ndarray", "Tensor") else ""
    if isinstance(value, list | tuple):
        hint = ": one number for one answer; several scores are a dict with the key 'reward'"
    raise DataError(f"{what} is {shown[:80]}{'...' if len(shown) > 80 else ''}; it must be a finite number{hint}")


_HIGHEST = 1e12  # sums and squares of larger rewards overflow the float32 of the learner


def checked_score(name: str, value: object, where: str) -> float:
    """Return the score, or the reward, as a float. ``where`` names its origin in errors. Raises ``DataError`` for a
    value that is not a finite number or is too large, and for a ``correct`` outside 0 to 1."""
    if not isinstance(name, str):
        raise DataError(f"a score {where} has the name {name!r}; it must be a text")
    what = f"the reward {where}" if name == "reward" else f"the score {name} {where}"
    number = finite(value, what)
    if abs(number) > _HIGHEST:
        raise DataError(f"{what} is {number:g}; it must be from {-_HIGHEST:g} to {_HIGHEST:g}: scale the rewards down")
    if name == "correct" and not 0 <= number <= 1:
        raise DataError(f"{what} is {number:g}; it must be from 0 to 1, because its mean is the accuracy")
    return number


class Environments(Generic[D]):
    """Makes and grades the episodes of a task set, and owns the resources for it (worker processes, models).
    ``TaskSet.open`` creates it; its caller must close it."""

    named_scores: ClassVar[NamedScores] = {}
    """The scores of ``grade`` by name; without any, a grade may have any scores."""

    def make(self, task: Task[D]) -> Environment:
        """Return a new episode of the task. By default it has one turn, graded by ``grade``."""
        from whet.tasks.episodes import SingleTurn

        return SingleTurn(self, task)

    def program_for(self, task: Task[D]) -> Program | None:
        """Return a new episode that is run by a program. By default None: ``make`` returns the episode."""
        return None

    def grade(self, task: Task[D], answer: str) -> Grade | Awaitable[Grade]:
        """Return the scores of one answer, including ``"reward"``, or the reward alone. Without ``"reward"``, it is the
        sum of ``named_scores`` by their weights. Only used by the default
        ``make``. Like every method here it may be ``async``, and should be if it waits for something."""
        raise ConfigError(f"{type(self).__name__} has no grade(): define it, or a make() that doesn't need it")

    @property
    def one_reply(self) -> bool:
        """Return whether an episode is one reply, which ``grade`` grades."""
        return type(self).make is Environments.make

    async def check_one_reply(self) -> None:
        """Raise ``ConfigError`` if episodes are longer than one reply, also where only a worker knows this."""
        if not self.one_reply:
            raise ConfigError(MORE_REPLIES.format(type(self).__name__))

    @property
    def graded_by(self) -> str:
        """Return the name and place of the user's code behind ``grade``, for error messages."""
        return place_of(type(self), "grade")

    @property
    def restarts(self) -> int:
        """Return the number of worker processes that were replaced so far. By default 0."""
        return 0

    def use_policy(self, ask: AskPolicy) -> None:
        """Take the means to ask the policy, apart from its episodes, before the first of them; nothing of it is
        trained. Environments that have others inside pass it to them. By default it isn't used."""

    async def score_group(self, task: Task[D], group: Group) -> None:
        """Set the rewards of the group's episodes relative to each other, in training. By default nothing."""

    async def close(self) -> None:
        """Release all resources. By default nothing."""


class TaskSet(Data, Environments[D], ABC):
    """Base of all task sets: a frozen config whose fields are its settings. Subclass it and name the dotted path as
    ``data.type`` in a recipe; the package needs no change. Lasting resources of grading (worker processes, a
    connection) belong to a separate ``Environments``, which ``open`` returns."""

    named_scores: ClassVar[NamedScores] = {}
    """The scores of an episode by name, of which a recipe may use names; without any, those names are not checked."""
    named_roles: ClassVar[tuple[str, ...]] = ()
    """The roles of a training episode, if it has several that different policies can play."""
    calls_tools: ClassVar[bool] = False
    """True if the model calls tools, so that an episode takes several replies."""

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task[D]]:
        """Return the tasks of ``"train"`` or ``"test"``, in a fixed order. All uids differ, and the splits don't
        overlap."""

    def cases(self) -> Sequence[Case]:
        """Return answers with known rewards: good, bad, boundary and adversarial answers. ``whet validate`` grades
        them. By default none."""
        return ()

    def gold(self, task: Task[D]) -> Answer | None:
        """Return a right answer to the task, which earns the full reward; None, as by default, if there is none."""
        return None

    def stated(self, task: Task[D], answer: str) -> str | None:
        """Return the final answer that a reply states, as a text that is equal for equal answers: majority votes count
        these. None, as by default: the reply states none, or answers to these tasks can't be equal."""
        return None

    def open(self) -> Environments[D]:
        """Return the object that makes and grades episodes. By default the task set itself, with its ``make`` or
        ``grade``."""
        return self

    @property
    def score_names(self) -> Collection[str]:
        """Return the names of all scores that an episode can have; empty if they are not declared."""
        return self.named_scores

    @property
    def role_names(self) -> Collection[str]:
        """Return the names of the roles of a training episode; empty if it has one, or they are not declared."""
        return self.named_roles

    @property
    def own_episodes(self) -> bool:
        """Return whether the class itself makes or grades episodes."""
        return type(self).grade is not Environments.grade or type(self).make is not Environments.make

    @property
    def has_programs(self) -> bool:
        """Return whether programs play its episodes, which call the policy themselves."""
        return type(self).program_for is not Environments.program_for

    @property
    def grades_groups(self) -> bool:
        """Return whether the class itself sets the rewards of whole groups."""
        return type(self).score_group is not Environments.score_group

    @property
    def grades(self) -> bool:
        """Return whether the task set rewards answers. If not, a reward model can reward them."""
        return self.own_episodes or type(self).open is not TaskSet.open

    @property
    def states_answers(self) -> bool:
        """Return whether answers to all tasks can be equal, so that majorities of ``stated`` have a meaning."""
        return type(self).stated is not TaskSet.stated
