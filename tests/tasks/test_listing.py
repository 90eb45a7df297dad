"""Mistakes in a ``tasks`` of the user's are named with their place."""

from collections.abc import Callable

import pytest

from tests.toy import Lowercase
from whet.base.errors import DataError
from whet.core.types import Task
from whet.rollouts.blend import Blend, Part
from whet.tasks.listing import tasks_of


def task(prompt: object, uid: object = "t") -> Task:
    return Task(uid, prompt)  # type: ignore[arg-type]


class Own(Lowercase):
    """Returns what ``made`` makes."""

    def tasks(self, split: str) -> object:  # type: ignore[override]
        return MADE[0]()


MADE: list[Callable[[], object]] = []


SAID = {"role": "user", "content": "What is 2 + 2?"}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: (task([]) for _ in range(3)), "must return a list of tasks, not a generator; make a list of an iter"),
        (lambda: None, "must return a list of tasks, not None"),
        (lambda: [{}["row"]], r"failed for the split 'train':(.|\n)*test_listing\.py(.|\n)*KeyError: 'row'"),
        (lambda: [{"prompt": "x"}], r"must return a list of tasks, .* and one is {'prompt': 'x'}"),
        (lambda: [task("What is 2 + 2?")], "the prompt of task 't' must be a list of messages, .* not 'What is 2"),
        (lambda: [task([{"role": "user", "content": None}])], "the prompt of task 't' must be a list of messages"),
        (lambda: [task([], "u"), task([]), task([])], "tasks 1 and 2 of the split 'train' have the same uid 't'"),
        (lambda: [task(["What is 2 + 2?"])], r"the prompt of task 't' must be a list of messages, .* not \['What is"),
        (lambda: [task([], 7)], "the uid of a task must be a text, by which records name it, not 7"),
        (lambda: [task([SAID | {"role": "usr"}])], "a message of task 't' must have the role 'user' in place of 'usr'"),
        (
            lambda: [task([SAID | {"by": {1: object()}}])],
            "a message of task 't' must have values that JSON can hold",
        ),
        (lambda: [task([SAID | {"by": MADE}])], "a message of task 't' must have values that JSON can hold, and 'by'"),
    ],
)
def test_a_mistake_is_named_with_its_place(made: Callable[[], object], words: str) -> None:
    MADE[:] = [made]
    for taskset in (Own(), Blend(of={"part": Part(taskset=Own())})):
        with pytest.raises(DataError, match=rf"Own\.tasks \(.*test_listing\.py:\d+\).*{words}"):
            tasks_of(taskset, "train")


def test_tasks_without_a_mistake_are_returned_as_they_are() -> None:
    tasks = [task([], "s"), task([{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}])]
    MADE[:] = [lambda: tasks]
    assert tasks_of(Own(), "test") is tasks
