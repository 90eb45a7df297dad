"""Validation of a task set's graders by answers with known rewards: the cases that it declares, a sample of its gold
answers, and gold answers of other tasks, which should be wrong."""

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
from whet.tasks.cases import Answer, Case
from whet.tasks.episodes import play
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.judges.config import check_has_no_own_judge
from whet.tasks.listing import tasks_of

GOLD, OTHERS = "gold", "another's gold"  # kinds of answers: gold answers of the task, and of another task
_DEADLINE = 120.0  # seconds for one answer


class ValidationConfig(Config):
    """The check of a run's graders before it trains."""

    required: bool = False
    """Grade answers with known rewards first, as ``whet validate`` does; stop if any is graded wrongly."""
    samples: int = Field(20, ge=0)
    """Number of gold answers to grade."""


@dataclass(frozen=True, slots=True)
class Graded:
    """An answer with its expected reward and its reward."""

    kind: str  # the kind of the case, or GOLD or OTHERS
    name: str
    expected: float
    got: float | None = None  # None after an error
    error: str = ""

    @property
    def right(self) -> bool:
        return self.got is not None and math.isclose(self.got, self.expected, abs_tol=1e-6)

    @property
    def outcome(self) -> str:
        return self.error or f"it earned {self.got:g}"


async def validate(taskset: TaskSet, samples: int, further: Sequence[Case] = ()) -> list[Graded]:
    """Grade all cases, the ``further`` ones too, and ``samples`` gold answers. Raises ``ConfigError`` if there is
    nothing to grade, or the policy would grade."""
    check_has_no_own_judge(taskset)
    cases, golds = [*taskset.cases(), *further], _golds(taskset, samples)
    if not cases and not golds:
        name = type(taskset).__name__
        raise ConfigError(f"{name} declares no answer with a known reward: define its cases() or gold()")
    answers: list[tuple[str, str, Task, Answer, float]]
    answers = [(case.kind, case.name, case.task, case.answer, case.expected) for case in cases]
    answers += [(GOLD, task.uid, task, gold, 1.0) for task, gold in golds]
    for (task, gold), (other, other_gold) in zip(golds, [*golds[1:], *golds[:1]], strict=True):
        if gold != other_gold:
            answers.append((OTHERS, f"{task.uid}, {other.uid}", task, other_gold, 0.0))
    environments = IsolatedEnvironments(taskset.open())
    try:
        return [await _graded(environments, *answer) for answer in answers]
    finally:
        await environments.close()


def wrong(graded: Sequence[Graded]) -> list[Graded]:
    """Return the answers that are graded wrongly. The gold answer of another task may be right by chance, so these only
    count if more than half of them are accepted."""
    others = [answer for answer in graded if answer.kind == OTHERS]
    by_chance = sum(not answer.right for answer in others) <= len(others) / 2
    return [
        answer for answer in graded if not answer.right and (answer.kind != OTHERS or answer.error or not by_chance)
    ]


async def require(taskset: TaskSet, samples: int) -> None:
    """Raise ``DataError`` naming the first answer that is graded wrongly."""
    if failures := wrong(await validate(taskset, samples)):
        first = failures[0]
        raise DataError(
            f"{len(failures)} answers with known rewards are graded wrongly, so nothing is trained on them; the first, "
            f"{first.name!r} ({first.kind}), should earn {first.expected:g}, but: {first.outcome}. "
            "`whet validate` lists them all"
        )


def _golds(taskset: TaskSet, samples: int) -> list[tuple[Task, Answer]]:
    tasks = [*tasks_of(taskset, "train"), *tasks_of(taskset, "test")]
    random.Random(derive_seed(0, "validate")).shuffle(tasks)
    golds: list[tuple[Task, Answer]] = []
    for task in tasks[: 10 * samples]:  # in some data sets only a few rows have a gold answer
        if len(golds) < samples and (gold := taskset.gold(task)) is not None:
            golds.append((task, gold))
    return golds


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
