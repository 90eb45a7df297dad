"""The interfaces of a task set and an environment. A ``TaskSet`` is settings: it poses tasks. Opened, it gives
``Environments``, which make one ``Environment`` for each episode.

Environments exchange messages with the model: they have no access to tokens, models or torch.

What to derive a task set from:

    TaskSet           tasks of any origin, with ``grade`` for single replies or ``make`` for longer episodes
    SplitTasks        both splits made together, once (``splits.py``; ``DrawnTasks`` from a seed, ``FileTasks`` of rows)
    SourcedTasks      rows of a file or, without one, tasks drawn from a seed (``task_source.py``)
    BoxedProblems     questions with a mathematical answer (``problems.py``)
    ToolTasks         tasks that are solved by calling tools (``tools/base.py``; ``SeededToolTasks`` from a seed)
    WrappedTaskSet    the tasks of another task set, played or rewarded differently (``wrapped.py``; ``Rewarded``)
"""

import contextlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeVar, TypeVarTuple, overload, runtime_checkable

from whet.base.errors import ConfigError, DataError
from whet.core.types import Group, Message, Task
from whet.data.base import Data
from whet.tasks.cases import Answer, Case

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Grade = Mapping[str, float] | float
"""Scores with ``"reward"`` among them, or the reward alone; a bool says whether the answer is right."""


@dataclass(slots=True)
class Observation:
    """The first messages for the model."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None  # JSON schemas for the chat template


@dataclass(slots=True)
class Step:
    """The environment's answer to one reply."""

    reward: float = 0.0  # added to the episode's reward
    done: bool = True
    messages: list[Message] = field(default_factory=list)  # shown to the model next, if not done
    scores: dict[str, float] = field(default_factory=dict)  # named components, merged into the trajectory's scores


@runtime_checkable
class Environment(Protocol):
    """One episode; also a base class, whose ``close`` does nothing. An exception is an infrastructure failure, never a
    reward: a bad answer of the model is a step with a low reward."""

    @abstractmethod
    async def start(self) -> Observation:
        """Return the first messages for the model. Called once."""

    @abstractmethod
    async def step(self, reply: Message) -> Step:
        """Return the reward and scores of a reply and, if the episode continues, the next messages."""

    async def close(self) -> None:
        """Release what the episode holds. Called once at the end, also after an exception and before the first step. By
        default nothing."""
        return


@dataclass(slots=True, frozen=True)
class Address:
    """Where a program finds the model: what a client of OpenAI's API is given."""

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
        """Release what the episode holds. Called once at the end, also after an exception. By default nothing."""
        return


@overload
async def called(call: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T: ...
@overload
async def called(call: Callable[[*Ts], T | Awaitable[T]], *args: *Ts) -> T: ...
async def called(call: Callable[[*Ts], T | Awaitable[T]], *args: *Ts) -> T:
    """Return ``call(*args)`` of a user's function, awaited where the function is ``async``."""
    result = call(*args)
    return await result if inspect.isawaitable(result) else result


def place_of(kind: type, method: str) -> str:
    """Return ``"Mine.grade (FILE:LINE)"`` of a method, to tell a user what to look at."""
    function = inspect.unwrap(getattr(kind, method))
    code = getattr(function, "__code__", None)
    return f"{kind.__name__}.{method}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


def finite(value: Any, what: str) -> float:
    """Return the value as a float. Raises ``DataError`` for anything that is not a finite number: a broken grader is
    never a reward of zero."""
    if isinstance(value, Real) or type(value).__name__ in ("bool", "bool_"):  # numpy's bool is not a Real
        with contextlib.suppress(OverflowError):  # a whole number beyond every float
            number = float(value)
            if math.isfinite(number):
                return number
    shown = repr(value)
    raise DataError(f"{what} is {shown[:80]}{'...' if len(shown) > 80 else ''}; it must be a finite number")


_HIGHEST = 1e12  # beyond, sums and squares of rewards leave the range of the floats that are learned in


def checked_score(name: str, value: Any, where: str) -> float:
    """Return the score, or the reward, as a float. ``where`` says whose it is. Raises ``DataError`` for what is not a
    finite number, or too large a one, and for ``correct`` beyond 0 to 1."""
    what = f"the reward {where}" if name == "reward" else f"the score {name} {where}"
    number = finite(value, what)
    if abs(number) > _HIGHEST:
        raise DataError(f"{what} is {number:g}; it must be from {-_HIGHEST:g} to {_HIGHEST:g}: scale the rewards down")
    if name == "correct" and not 0 <= number <= 1:
        raise DataError(f"{what} is {number:g}; it must be from 0 to 1, for its mean is the accuracy")
    return number


class Environments:
    """The live side of a task set: makes and grades its episodes, and holds what that takes (worker processes, models).
    ``TaskSet.open`` builds it from the settings; whoever opens it closes it."""

    def make(self, task: Task) -> Environment:
        """Return a fresh episode of the task. By default one turn, graded by ``grade``."""
        from whet.tasks.single_turn import SingleTurn

        return SingleTurn(self, task)

    def program_for(self, task: Task) -> Program | None:
        """Return a fresh episode of a task that is done by a program. By default None: ``make`` gives the episode."""
        return None

    def grade(self, task: Task, answer: str) -> Grade | Awaitable[Grade]:
        """Return the scores of one answer, ``"reward"`` among them, or the reward alone. Only used by the default
        ``make``. Like every method here it may be ``async``, and should be where it waits for something."""
        raise ConfigError(f"{type(self).__name__} has no grade(): define it, or a make() that does without")

    async def score_group(self, task: Task, group: Group) -> None:
        """Change rewards in view of the whole group (relative rewards), in training. By default nothing."""

    async def close(self) -> None:
        """Let go of what is held. By default nothing."""


class TaskSet(Data, Environments, ABC):
    """Base of all task sets: a frozen config whose fields are its settings. Subclass it and give the dotted path as
    ``data.type`` in a recipe; no change to the package is needed. What grading holds for long (worker processes, a
    connection) belongs to an ``Environments`` of its own, which ``open`` returns."""

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of ``"train"`` or ``"test"``, in a fixed order, no uid twice. They don't overlap."""

    def cases(self) -> Sequence[Case]:
        """Return answers with known rewards: good, bad, at the boundary and adversarial ones. ``whet validate`` grades
        them. By default none."""
        return ()

    def gold(self, task: Task) -> Answer | None:
        """Return a right answer to the task, which earns full marks; None where the data know none, as by default."""
        return None

    def open(self) -> Environments:
        """Build what makes and grades episodes. By default the task set itself, by its own ``make`` or ``grade``."""
        return self

    @property
    def own_episodes(self) -> bool:
        """Return whether the class itself makes or grades episodes."""
        return type(self).grade is not Environments.grade or type(self).make is not Environments.make

    @property
    def grades(self) -> bool:
        """Whether answers are rewarded. A task set that only poses tasks can be rewarded by a reward model."""
        return self.own_episodes or type(self).open is not TaskSet.open
