"""An attack of the built-in task sets, which must find nothing."""

import asyncio
from dataclasses import replace

import pytest

from tests.grids import taking_turns
from tests.tasks.built_in import BUILT_IN
from whet.tasks.adapters.reasoning_gym import ReasoningGym
from whet.tasks.attack.attack import Plan, attack
from whet.tasks.base import TaskSet
from whet.tasks.code.task_set import Code
from whet.tasks.judges.genrm_training import GenRMTraining
from whet.tasks.reviews import Reviews
from whet.tasks.shell.generated import ShellTasks
from whet.tasks.shell.repositories import Repositories
from whet.tasks.structured.task_set import StructuredOutput
from whet.tasks.tools.hallucination import ToolHallucination
from whet.tasks.tools.office import OfficeTasks
from whet.tasks.users.booking import BookingDesk

pytestmark = pytest.mark.usefixtures("forked_children")

PLAN = Plan(samples=4, budget=1050, seconds=600.0, deadline=120.0)
OTHERS = [
    Code(train_size=20, test_size=5),
    GenRMTraining(train_size=20, test_size=5),
    OfficeTasks(train_size=20, test_size=5),
    Reviews(train_size=20, test_size=5),
    StructuredOutput(train_size=20, test_size=5, format="csv"),
    ToolHallucination(train_size=20, test_size=5),
]


DEAR = (BookingDesk, Code, OfficeTasks, ReasoningGym, StructuredOutput)


@pytest.mark.parametrize(
    "taskset",
    taking_turns([*BUILT_IN, *OTHERS], [each for each in [*BUILT_IN, *OTHERS] if not isinstance(each, DEAR)]),
    ids=lambda taskset: type(taskset).__name__,
)
def test_no_cheap_answer_earns_a_reward(taskset: TaskSet) -> None:
    report = asyncio.run(attack(taskset, PLAN))
    assert not report.findings
    assert report.tried["empty"] >= 4
    assert not any("gradings or seconds" in what for what in report.not_attacked)


@pytest.mark.slow
@pytest.mark.parametrize("taskset", [ShellTasks(), Repositories()], ids=lambda taskset: type(taskset).__name__)
def test_no_cheap_answer_earns_a_reward_in_a_shell(taskset: TaskSet) -> None:
    report = asyncio.run(attack(taskset, replace(PLAN, samples=2)))  # each grading runs programs in a sandbox
    assert not report.findings
    assert report.tried["empty"] >= 4
    assert report.tried["mutated gold"] >= 4
    assert not any("gradings or seconds" in what for what in report.not_attacked)
