"""A user-defined class is imported by its dotted path, and its errors are reported with file and line."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Protocol

import pytest

from tests.config.settings import Loss, Pair, Settings
from whet.config import Component, Config, RecipeError, dump_yaml, load
from whet.config.component import ComponentError, component_path, import_path
from whet.config.moved import MOVED

MINE = "from tests.config.settings import Loss\nclass Mine(Loss):\n    power: tuple[int, ...] = (1,)\n"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry != ""])
    return tmp_path


def loaded(text: str):
    Path("r.yaml").write_text(text)
    return load(Settings, "r.yaml", search=Path()).value


@pytest.mark.parametrize("separator", [":", "."])
def test_a_class_in_the_current_folder_is_found_and_written_back(separator):
    module = f"mine_{ord(separator)}"
    Path(f"{module}.py").write_text(MINE)
    value = loaded(f"loss: {{type: {module}{separator}Mine, power: [2, 3]}}")
    assert type(value.loss).__name__ == "Mine"
    assert value.loss.power == (2, 3)
    text = dump_yaml(value)
    assert f"type: {module}:Mine" in text
    assert loaded(text) == value


def test_a_class_may_compute_from_its_settings_after_they_are_checked():
    computes = (
        "    path: str\n    _size: int\n    def model_post_init(self, context):\n        self._size = len(self.path)\n"
    )
    Path("my_board.py").write_text(MINE + computes)
    assert loaded("loss: {type: my_board:Mine, path: abc}").loss._size == 3


def test_only_the_chosen_class_is_imported():
    class Lazy(Config):
        loss: Annotated[Loss, Component({"pair": "tests.config.settings:Pair", "heavy": "no_such_module:Heavy"})]

    assert Lazy(loss="pair").loss == Pair()


BROKEN = {
    "raises": ("x = 1\nraise RuntimeError('no disk')\n", "RuntimeError: no disk at", "my_raises.py:2"),
    "syntax": ("x = 1\nclass Mine(:\n", "invalid syntax at", "my_syntax.py:2"),
    "needs": ("import not_there_at_all\n", "needs 'not_there_at_all', which is not installed at", "my_needs.py:1"),
    "exits": ("raise SystemExit(3)\n", "SystemExit: 3 at", "my_exits.py:1"),
    "lacks": (MINE.replace("Mine", "Mime"), "has no 'Mine'", "Did you mean 'Mime'?"),
    "foreign": ("class Mine: pass\n", "is not a class derived from whet.config.Config", "loss.type"),
    "sibling": (
        "from whet.config import Config\nclass Mine(Config): pass\n",
        "is not a Loss: derive it from tests.config.settings:Loss",
        "loss.type",
    ),
    "unfinished": (
        f"from abc import abstractmethod\n{MINE}    @abstractmethod\n    def of(self): ...\n",
        "my_unfinished:Mine must define of",
        "loss.type",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_in_a_users_module_is_reported_with_its_place(name):
    source, *expected = BROKEN[name]
    Path(f"my_{name}.py").write_text(source)
    with pytest.raises(RecipeError) as caught:
        loaded(f"loss:\n  type: my_{name}:Mine\n")
    for part in ("r.yaml:2: loss.type:", *expected):
        assert part in str(caught.value)


def test_an_exception_in_a_users_class_is_reported_with_its_place():
    Path("my_fails.py").write_text(f"{MINE}    def model_post_init(self, context):\n        open('board.txt')\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:1: loss: my_fails:Mine .* FileNotFoundError: .*my_fails\.py:5"):
        loaded("loss: my_fails:Mine")


def test_the_error_for_a_missing_module_names_the_searched_places(in_empty_folder):
    with pytest.raises(RecipeError, match="there is no module 'nowhere': searched ") as caught:
        loaded("loss: nowhere.deep:Mine")
    assert str(in_empty_folder) in str(caught.value)


def test_a_protocol_is_checked_by_its_members():
    class Named(Protocol):
        needs: frozenset[str]

        def __call__(self) -> int: ...

    class Holder(Config):
        part: Annotated[Named, Component({"pair": "tests.config.settings:Pair"})]

    with pytest.raises(ValueError, match="is not a Named: it lacks __call__, needs"):
        Holder(part="pair")


SCRIPT = """
import sys
import whet
from helper_beside import NUMBER
from whet.tasks.base import TaskSet
from whet.run.recipe import Recipe
from whet.core.types import Task

class Mine(TaskSet):
    def tasks(self, split):
        return [Task(f"{split}/{i}", [{"role": "user", "content": str(NUMBER)}], {}) for i in range(3)]

    def grade(self, task, answer):
        return 1.0

if __name__ == "__main__" or GUARD:
    from whet.config import dump_yaml
    print(dump_yaml(whet.read(data=Mine())))
    whet.start(data=Mine(), folder="run") if GUARD else None
"""


def test_a_class_of_a_script_is_found_again_by_the_script_s_path(tmp_path):
    (tmp_path / "helper_beside.py").write_text("NUMBER = 7\n")
    script = tmp_path / "my_script.py"
    script.write_text(SCRIPT.replace("GUARD", "False"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True, cwd="/")
    assert f"type: {script}:Mine" in done.stdout
    found = import_path(f"{script}:Mine")
    assert found().tasks("train")[0].prompt[0]["content"] == "7"
    assert component_path(found) == f"{script}:Mine"
    with pytest.raises(ComponentError, match=r"my_script\.py has no 'Mina'\. Did you mean 'Mine'"):
        import_path(f"{script}:Mina")
    with pytest.raises(ComponentError, match=r"there is no file .*nowhere\.py"):
        import_path(f"{tmp_path}/nowhere.py:Mine")


def test_a_script_without_a_guard_says_so_instead_of_training_when_it_is_imported(tmp_path):
    (tmp_path / "helper_beside.py").write_text("NUMBER = 7\n")
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT.replace("GUARD", "True"))
    with pytest.raises(ComponentError, match="starts a run while it is imported"):
        import_path(f"{script}:Mine")


def test_the_old_path_of_a_class_that_moved_is_answered_with_its_new_one():
    with pytest.raises(ComponentError, match=r"has moved: write whet\.tasks\.code\.task_set:Code$"):
        import_path("whet.environments.code:Code")


@pytest.mark.parametrize("new", sorted(MOVED.values()))
def test_every_module_that_moved_stands_where_the_table_says(new):
    assert importlib.util.find_spec(new) is not None
