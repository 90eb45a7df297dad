"""Task sets that read rows or make tasks up: two splits without a task in common, the same in every run."""

import asyncio
import json
import os
import subprocess
import sys
from hashlib import sha256

import pytest
from pydantic_core import to_jsonable_python

from tests.tasks.built_in import BUILT_IN
from whet.base.errors import ConfigError
from whet.config import SettingsError
from whet.config.component import import_path
from whet.tasks.base import TASK_SETS
from whet.tasks.choice.task_set import MultipleChoice
from whet.tasks.validate import validate, wrong

pytestmark = pytest.mark.usefixtures("forked_children")

SEEDED = ("multiple_choice", "structured_output", "instruction_following", "long_context")


def made(name, **settings):
    return import_path(TASK_SETS[name])(**{"train_size": 40, "test_size": 10, **settings})


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def questions(count):
    return [{"question": f"{n}?", "options": ["x", "y"], "answer": "A"} for n in range(count)]


@pytest.mark.parametrize("name", SEEDED)
def test_generated_tasks_depend_on_the_seed_alone_and_no_test_task_is_trained_on(name):
    pytest.importorskip("if_verifiable")
    taskset = made(name)
    train, test = taskset.tasks("train"), taskset.tasks("test")
    assert (len(train), len(test)) == (40, 10)
    assert not {taskset.key(task) for task in train} & {taskset.key(task) for task in test}
    assert train == made(name).tasks("train") != made(name, seed=1).tasks("train")
    assert all(json.loads(json.dumps(data := to_jsonable_python(task.columns))) == data for task in train)
    assert len({task.uid for task in [*train, *test]}) == 50


@pytest.mark.slow
def test_generated_tasks_are_the_same_in_every_process():
    """A set of texts is in another order in each process, unless PYTHONHASHSEED is set."""
    code = (
        "from tests.tasks.built_in import BUILT_IN\nfrom hashlib import sha256\n"
        "for tasks in BUILT_IN: print(type(tasks).__name__, sha256(repr(tasks.tasks('train')).encode()).hexdigest())"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", code], env=there, stdout=subprocess.PIPE, text=True, timeout=300)
    drawn = [(type(made).__name__, sha256(repr(made.tasks("train")).encode()).hexdigest()) for made in BUILT_IN]
    assert [tuple(line.split()) for line in done.stdout.splitlines()] == drawn


@pytest.mark.parametrize("name", SEEDED)
def test_every_case_earns_its_expected_reward(name):
    pytest.importorskip("if_verifiable")
    graded = asyncio.run(validate(made(name), samples=5))
    assert not wrong(graded)
    assert {one.kind for one in graded} >= {"good", "boundary", "adversarial", "gold"}


def test_test_rows_are_held_out_or_come_from_a_separate_file(tmp_path):
    path = write(tmp_path / "train.jsonl", *questions(40))
    held = MultipleChoice(path=path, test_size=10)
    assert (len(held.tasks("train")), len(held.tasks("test"))) == (30, 10)
    apart = MultipleChoice(path=path, test_path=write(tmp_path / "test.jsonl", *questions(5)), train_size=20)
    assert (len(apart.tasks("train")), len(apart.tasks("test"))) == (20, 5)
    assert not {apart.key(task) for task in apart.tasks("train")} & {apart.key(task) for task in apart.tasks("test")}


def test_settings_of_a_file_without_one_and_too_few_different_tasks_are_errors():
    with pytest.raises(SettingsError, match="test_path and columns need a path"):
        MultipleChoice(columns={"question": "q"})

    class Same(MultipleChoice):
        def draw(self, rng):
            return self._task("?", {"A": "x", "B": "y"}, "A", "boxed", None)

    with pytest.raises(ConfigError, match="only 1 different train tasks in 120 draws, but train_size is 5"):
        Same(train_size=5, test_size=0).tasks("train")
