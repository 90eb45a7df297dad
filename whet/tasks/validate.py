"""Grades answers whose reward is known: the cases that a task set declares, a sample of the data's own right answers,
and, against each other's tasks, the same answers again."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from whet.base.errors import ConfigError, DataError
from whet.base.seeds import derive_seed
from whet.config import Config
from whet.core.types import Task
from whet.processes.loop_thread import format_error
from whet.tasks.base import TaskSet
from whet.tasks.cases import Answer
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.play import play

GOLD, OTHERS = "gold", "another's gold"  # right answers of the data: to their own task, and to another one
_DEADLINE = 120.0  # seconds that one answer may take


class ValidationConfig(Config):
    """Whether a run checks its graders before it trains."""

    required: bool = False
    """Grade answers with known rewards first, as ``whet validate`` does; stop if any is graded wrongly."""
    samples: int = Field(20, ge=0)
    """How many of the data's own right answers to grade."""


@dataclass(frozen=True, slots=True)
class Graded:
    """An answer, what it should be worth and what it is."""

    kind: str  # of the case; or GOLD, OTHERS
    name: str
    expected: float
    got: float | None = None
    error: str = ""

    @property
    def right(self) -> bool:
        return self.got is not None and math.isclose(self.got, self.expected, abs_tol=1e-6)

    @property
    def outcome(self) -> str:
        return self.error or f"it earned {self.got:g}"


async def validate(taskset: TaskSet, samples: int) -> list[Graded]:
    """Grade all cases, and ``samples`` of the right answers that the data know. Raises ``ConfigError`` where there is
    nothing to grade."""
    cases, golds = taskset.cases(), _golds(taskset, samples)
    if not cases and not golds:
        name = type(taskset).__name__
        raise ConfigError(f"{name} declares no answer whose reward is known: define its cases() or gold()")
    answers: list[tuple[str, str, Task, Answer, float]]
    answers = [(case.kind, case.name, case.task, case.answer, case.expected) for case in cases]
    answers += [(GOLD, task.uid, task, gold, 1.0) for task, gold in golds]
    for (task, own), (other, gold) in zip(golds, [*golds[1:], *golds[:1]], strict=True):
        if own != gold:
            answers.append((OTHERS, f"{task.uid}, {other.uid}", task, gold, 0.0))
    environments = IsolatedEnvironments(taskset.open())
    try:
        return [await _graded(environments, *answer) for answer in answers]
    finally:
        await environments.close()


def wrong(graded: Sequence[Graded]) -> list[Graded]:
    """Return what is not graded as it should be. Another task's answer may be right by chance, so those count only
    where more than half of them are accepted."""
    others = [one for one in graded if one.kind == OTHERS]
    chance = sum(not one.right for one in others) <= len(others) / 2
    return [one for one in graded if not one.right and (one.kind != OTHERS or one.error or not chance)]


async def require(taskset: TaskSet, samples: int) -> None:
    """Raise ``DataError`` naming the first answer that is graded wrongly."""
    if found := wrong(await validate(taskset, samples)):
        first = found[0]
        raise DataError(
            f"{len(found)} answers with known rewards are graded wrongly, so nothing is trained on them; the first, "
            f"{first.name!r} ({first.kind}), should earn {first.expected:g}, but: {first.outcome}. "
            "`whet validate` lists them all"
        )


def _golds(taskset: TaskSet, samples: int) -> list[tuple[Task, Answer]]:
    tasks = [*taskset.tasks("train"), *taskset.tasks("test")]
    random.Random(derive_seed(0, "validate")).shuffle(tasks)
    found: list[tuple[Task, Answer]] = []
    for task in tasks[: 10 * samples]:  # of some data only a few rows have one
        if len(found) < samples and (gold := taskset.gold(task)) is not None:
            found.append((task, gold))
    return found


async def _graded(
    environments: IsolatedEnvironments, kind: str, name: str, task: Task, answer: Answer, expected: float
) -> Graded:
    try:
        async with asyncio.timeout(_DEADLINE):
            _, episode = await play(environments.make(task), answer)
    except TimeoutError:
        return Graded(kind, name, expected, error=f"no grade within {_DEADLINE:g} s")
    except Exception as error:
        return Graded(kind, name, expected, error=format_error(error))
    from_data = kind in (GOLD, OTHERS) and "correct" in episode.scores  # the scale of rewards differs between task sets
    return Graded(kind, name, expected, episode.scores["correct"] if from_data else episode.reward)
