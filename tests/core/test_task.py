"""Tasks with data of any kind: readers of names see the same columns."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from whet.base.errors import DataError
from whet.core.types import Task
from whet.rollouts.curriculum import PassRateCurriculum


@dataclass(frozen=True, slots=True)
class Sum:
    answer: str
    difficulty: float | None = None


class Asked(BaseModel):
    answer: str
    difficulty: float | None = None


def test_readers_of_names_see_the_same_columns_of_a_dict_a_data_class_and_a_model() -> None:
    given: list[Any] = [{"answer": "3"}, Sum("3"), Asked(answer="3")]
    for data in given:
        assert Task("a", [], data).columns == {"answer": "3"}
    assert Task("a", []).columns == {}
    assert Task("a", [], {"answer": None}).columns == {"answer": None}, "a row's null stays"


def test_data_without_names_is_an_error_that_names_the_task() -> None:
    data: list[Any] = ["3", ["answer"], Sum]
    for each in data:
        with pytest.raises(DataError, match=r"task 'sums/3': its data must be a dict, a data class or a pydantic"):
            _ = Task("sums/3", [], each).columns


def test_a_typed_task_reaches_another_process_whole() -> None:
    task: Task[Sum] = Task("a", [{"role": "user", "content": "1 + 2?"}], Sum("3", 0.5))
    assert pickle.loads(pickle.dumps(task)) == task


def test_a_curriculum_reads_the_difficulty_of_typed_data() -> None:
    tasks = [Task(str(number), [], Sum("", difficulty)) for number, difficulty in enumerate((3.0, 1.0, None, 2.0))]
    sampler = PassRateCurriculum().sampler_for(tasks, seed=0)
    assert [sampler.draw(0, set()) for _ in tasks] == [1, 3, 0, 2]
