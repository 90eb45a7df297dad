"""An attack of the built-in task sets, which must find nothing."""

import asyncio

import pytest

from whet.tasks.adapters.reasoning_gym import ReasoningGym
from whet.tasks.attack.attack import Plan, attack
from whet.tasks.base import TaskSet
from whet.tasks.choice.task_set import MultipleChoice
from whet.tasks.code.task_set import Code
from whet.tasks.games import Guessing, SlidingPuzzle
from whet.tasks.instructions.task_set import InstructionFollowing
from whet.tasks.judges.genrm_training import GenRMTraining
from whet.tasks.long_context import LongContext
from whet.tasks.math.arithmetic import Arithmetic
from whet.tasks.structured.task_set import StructuredOutput
from whet.tasks.tools.calculator import Calculator
from whet.tasks.tools.corpus_search import CorpusSearch
from whet.tasks.tools.database import Database
from whet.tasks.tools.hallucination import ToolHallucination
from whet.tasks.tools.office import OfficeTasks

PLAN = Plan(samples=4, budget=700, seconds=600.0, deadline=120.0)


@pytest.mark.parametrize(
    "taskset",
    [
        Arithmetic(train_size=30, test_size=5),
        Arithmetic(train_size=30, test_size=5, stories=1.0),
        Calculator(train_size=20, test_size=5),
        Code(train_size=20, test_size=5),
        CorpusSearch(train_size=20, test_size=5, towns=50),
        Database(train_size=20, test_size=5),
        GenRMTraining(train_size=20, test_size=5),
        Guessing(train_size=20, test_size=5),
        InstructionFollowing(train_size=20, test_size=5),
        LongContext(train_size=20, test_size=5),
        MultipleChoice(train_size=20, test_size=5),
        MultipleChoice(train_size=20, test_size=5, mode="lenient"),
        MultipleChoice(train_size=20, test_size=5, mode="line"),
        OfficeTasks(train_size=20, test_size=5),
        SlidingPuzzle(train_size=20, test_size=5),
        StructuredOutput(train_size=20, test_size=5),
        StructuredOutput(train_size=20, test_size=5, format="csv"),
        ToolHallucination(train_size=20, test_size=5),
        ReasoningGym(dataset="chain_sum", train_size=10, test_size=5),
        ReasoningGym(dataset="letter_counting", train_size=10, test_size=5, answer="last_line"),
    ],
    ids=lambda taskset: type(taskset).__name__,
)
def test_no_cheap_answer_earns_a_reward(taskset: TaskSet) -> None:
    report = asyncio.run(attack(taskset, PLAN))
    assert not report.findings
    assert report.tried["empty"] >= 4
    assert not any("gradings or seconds" in what for what in report.not_attacked)
