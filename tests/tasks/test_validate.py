"""Validation of graders: by declared cases, and by gold answers of the task and of other tasks."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.tasks.built_in import BUILT_IN
from tests.toy import Lowercase
from whet.base.errors import ConfigError, DataError
from whet.core.types import Message, Task
from whet.tasks.adapters.reasoning_gym import ReasoningGym
from whet.tasks.base import Observation, Step, TaskSet
from whet.tasks.cases import Case
from whet.tasks.math.arithmetic import Arithmetic
from whet.tasks.math.notation import last_boxed
from whet.tasks.validate import GOLD, OTHERS, require, validate, wrong

pytestmark = pytest.mark.usefixtures("forked_children")


class Echo(Lowercase):
    """Right is the task's own uid."""

    accepts_all: bool = False
    fails: bool = False

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if self.fails:
            raise ConnectionError("the grader is away")
        return {"reward": 2.0 * (answer == task.uid or self.accepts_all), "correct": float(answer == task.uid)}

    def gold(self, task: Task) -> str:
        return task.uid

    def cases(self) -> Sequence[Case]:
        task = self.tasks("train")[0]
        return [Case("itself", task, task.uid, 2.0, "good"), Case("nothing", task, "", 0.0, "boundary")]


def replies(*texts: str) -> list[Message]:
    return [{"role": "assistant", "content": text} for text in texts]


class Counting(Lowercase):
    """An episode of three turns; a reply of "skip" ends it."""

    def make(self, task: Task) -> "Counting":
        return self

    async def start(self) -> Observation:
        return Observation([])

    async def step(self, reply: Message) -> Step:
        return Step(1.0, done=reply["content"] == "skip")

    async def close(self) -> None:
        pass

    def cases(self) -> Sequence[Case]:
        task = self.tasks("train")[0]
        return [
            Case("three", task, replies("a", "b", "c"), 3.0, "good"),
            Case("ends", task, replies("skip", "a"), 1.0, "good"),
        ]


def test_a_sound_task_set_has_no_wrong_grades() -> None:
    graded = asyncio.run(validate(Echo(), 5))
    assert [one.kind for one in graded] == ["good", "boundary", *[GOLD] * 5, *[OTHERS] * 5]
    assert not wrong(graded)


def test_a_grader_that_accepts_everything_is_found_out() -> None:
    found = wrong(asyncio.run(validate(Echo(accepts_all=True), 0)))
    assert [(one.name, one.got) for one in found] == [("nothing", 2.0)]


def test_a_run_that_requires_sound_grades_names_the_first_wrong_one() -> None:
    with pytest.raises(DataError, match=r"'nothing' \(boundary\), should earn 0, but: it earned 2"):
        asyncio.run(require(Echo(accepts_all=True), 0))
    asyncio.run(require(Echo(), 3))


def test_a_grader_that_raises_is_wrong_with_the_error() -> None:
    found = wrong(asyncio.run(validate(Echo(fails=True), 1)))
    assert len(found) == 3
    assert "the grader is away" in found[0].error


def test_another_tasks_answer_may_be_right_by_chance_but_not_mostly() -> None:
    class Lenient(Echo):
        letters: str = "0"

        async def grade(self, task: Task, answer: str) -> dict[str, float]:
            return {"reward": float(answer == task.uid or answer[-1:] in set(self.letters) - {""})}

        def cases(self) -> Sequence[Case]:
            return ()

    assert not wrong(asyncio.run(validate(Lenient(letters="0"), 10)))
    assert wrong(asyncio.run(validate(Lenient(letters="0123456789"), 10)))


def test_replies_of_several_turns_are_given_until_the_episode_is_done() -> None:
    assert [one.got for one in asyncio.run(validate(Counting(), 0))] == [3.0, 1.0]


def test_a_task_set_that_declares_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"Lowercase declares no answer.*cases\(\) or gold\(\)"):
        asyncio.run(validate(Lowercase(), 5))


COUNTDOWN = ReasoningGym(dataset="countdown", train_size=10, test_size=5, answer="boxed")


@pytest.mark.parametrize("taskset", [*BUILT_IN, COUNTDOWN], ids=lambda taskset: type(taskset).__name__)
def test_the_built_in_task_sets_grade_their_cases_correctly(taskset: TaskSet) -> None:
    graded = asyncio.run(validate(taskset, 6))
    assert not wrong(graded)
    assert sum(one.kind == GOLD for one in graded) == 6
    if not isinstance(taskset, ReasoningGym):
        assert {"the question again", "a constant"} <= {one.name for one in graded}


def test_a_grader_that_pays_for_the_question_itself_is_found_out() -> None:
    class Computes(Arithmetic):
        async def grade(self, task: Task, answer: str) -> dict[str, float]:
            asked = task.prompt[-1]["content"].split("?")[0].removeprefix("What is ")
            return {"reward": float(last_boxed(answer) in (task.data.answer, asked))}

    found = wrong(asyncio.run(validate(Computes(train_size=30, test_size=5), 0)))
    assert "an expression of the question" in {one.name for one in found}
