"""Toy repositories: the repaired file earns 1, by a tool and by an agent's command; no cheat earns anything."""

import asyncio
import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.endpoint.agents import first_episode
from tests.endpoint.test_command import CALL
from tests.grids import taking_turns
from tests.tasks.test_task_folders import CHEATS as FOLDER_CHEATS
from whet.config import SettingsError
from whet.core.types import Episode, Status, Task
from whet.rollouts.sampling import Sampling
from whet.shells.local import Local, _problem
from whet.shells.runtime import FileProblem, ShellLimits
from whet.tasks.base import Step
from whet.tasks.episodes import play
from whet.tasks.program import AgentTasks
from whet.tasks.shell.repositories import Repositories, Repository, row
from whet.tasks.shell.toy_code import SAMPLES, result_of
from whet.tasks.tools.base import solution
from whet.tasks.validate import validate, wrong
from whet.tasks.work_folder import pack, unpack

pytestmark = pytest.mark.skipif(bool(_problem()), reason=f"this system can't isolate commands: {_problem()}")

SMALL: dict[str, Any] = {"train_size": 8, "test_size": 2}


@cache
def repositories() -> Repositories:
    return Repositories(**SMALL, runtime=Local(limits=ShellLimits(deadline_s=10, disk_mib=4, memory_mib=256)))


def first() -> Task[Repository]:
    return repositories().tasks("train")[0]


def played(*commands: str) -> Step:
    calls = [("bash", {"command": command}) for command in commands]
    _, step = asyncio.run(play(repositories().make(first()), solution(*calls, answer="done")))
    return step


def module(code: str) -> str:
    """Return a command that writes the file with the bug. ``NAME`` in the code is the function's name."""
    bug = next(call for call in first().data.calls if call.fails)
    text = code.replace("NAME", bug.function)
    return f"cat > {first().data.path} <<'END'\n{text}\nEND"


def gold() -> str:
    return f"cat > {first().data.path} <<'END'\n{first().data.repaired}END"


def test_no_constant_passes_the_hidden_tests_of_a_function() -> None:
    for task in Repositories(train_size=80, test_size=1).tasks("train"):
        broken = next(call.function for call in task.data.calls if call.fails)
        assert len({json.dumps(call.result) for call in task.data.calls if call.function == broken}) > 1, task.uid


def test_gold_earns_1_and_nothing_earns_0() -> None:
    assert wrong(asyncio.run(validate(repositories(), 4))) == []


@pytest.mark.parametrize("name", SAMPLES)
def test_each_function_has_a_bug_that_some_arguments_show(name: str) -> None:
    sample, rng = SAMPLES[name], random.Random(0)
    drawn = [sample.draw(rng) for _ in range(60)]
    right = [result_of(sample.source, name, arguments) for arguments in drawn]
    broken = [result_of(sample.broken, name, arguments) for arguments in drawn]
    assert sum(a != b for a, b in zip(right, broken, strict=True)) >= 5
    assert not any(isinstance(result, dict) for result in right), "the right source raises"


def test_the_hidden_tests_are_other_calls_than_the_visible_ones() -> None:
    for task in repositories().tasks("train"):
        visible = task.data.before["test_visible.py"]
        assert all(f"{call.function}(*{call.arguments!r})" not in visible for call in task.data.calls)
        assert sum(call.fails for call in task.data.calls) >= 3
        assert all(call.name not in str(task.prompt) for call in task.data.calls)


def test_the_policy_can_run_the_visible_tests() -> None:
    run = "python3 -m unittest 2>&1 | tail -1"
    results = [m["content"] for m in played(run, gold(), run).messages if m["role"] == "tool"]
    assert (results[0], results[-1]) == ("FAILED (failures=1)", "OK")
    assert played(run).scores["fail_to_pass"] == 0.0


CHEATS = {
    **FOLDER_CHEATS,
    "ends the process": module("import os\nos._exit(0)"),
    "writes the results itself": module(
        "import os\nfor line in range(40):\n    open('/logs/results.jsonl', 'a').write('0\\n')\nos._exit(0)"
    ),
    "reads the calls": module(
        "import json\nprint(open('/tests/calls.json').read())\ndef NAME(*_):\n"
        "    return json.load(open('/tests/calls.json'))[1][0][2]"
    ),
    "looks for results in the frames": module(
        "import sys\ndef NAME(*_):\n    f = sys._getframe()\n    while f:\n"
        "        for v in list(f.f_locals.values()):\n"
        "            if isinstance(v, list) and v and not isinstance(v[0], list):\n                return v[-1]\n"
        "        f = f.f_back"
    ),
    "an object that equals everything": module(
        "class E(float):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef NAME(*_): return E(0)"
    ),
    "changes json": module("import json\njson.dumps = lambda value: 'true'\ndef NAME(*_): return True"),
    "tests that always pass": "echo 'import unittest' > test_visible.py; echo 'pass' > conftest.py",
    "deletes the repository": "rm -rf ./* .[a-z]*",
    "a folder in place of the module": f"rm {first().data.path}; mkdir {first().data.path}",
    "never ends": module("while True: pass"),
    "fills the memory": module("x = bytearray(1 << 40)"),
    "deep results": module("def NAME(*_):\n    return eval('[' * 90 + ']' * 90)\nprint('[' * 10**6)"),
}


@pytest.mark.parametrize("what", taking_turns(CHEATS, CHEATS.keys() - FOLDER_CHEATS.keys() - {"never ends"}))
def test_cheats_earn_nothing(what: str) -> None:
    assert played(CHEATS[what]).reward == 0.0


def test_a_table_of_the_visible_results_earns_nothing() -> None:
    bug = next(call for call in first().data.calls if call.fails)
    lines = first().data.before["test_visible.py"].splitlines()
    shown = next(line for line in lines if f".{bug.function}(*" in line)
    arguments, result = shown.split("(*", 1)[1].rsplit("), ", 1)
    step = played(module(f"def NAME(*given):\n    if list(given) == {arguments}: return {result}"))
    assert step.reward == 0.0


def test_a_right_repair_earns_its_reward_among_remains_of_cheats() -> None:
    kept = ["modules that shadow the standard library", "a user's site-packages", "files that shells read"]
    step = played(*(FOLDER_CHEATS[what] for what in kept), gold())
    assert (step.reward, step.scores["fail_to_pass"], step.scores["pass_to_pass"]) == (1.0, 1.0, 1.0)


def test_a_repair_that_breaks_another_function_earns_nothing() -> None:
    bug = next(call for call in first().data.calls if call.fails)
    source = SAMPLES[bug.function].source
    others = [path for path in first().data.before if path not in (first().data.path, "test_visible.py")]
    step = played(module(source), *[f"echo > {path}" for path in others])
    assert (step.reward, step.scores["fail_to_pass"]) == (0.0, 1.0)
    assert step.scores["pass_to_pass"] < 1.0


def test_a_task_is_a_row_in_the_columns_of_swe_bench(tmp_path: Path) -> None:
    columns = row(first())
    assert list(columns) == [
        *("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"),
        *("FAIL_TO_PASS", "PASS_TO_PASS"),
    ]
    for path, text in first().data.before.items():
        (tmp_path / path).write_text(text)
    for patch in (columns["test_patch"], columns["patch"]):
        failed = subprocess.run([sys.executable, "test_hidden.py"], cwd=tmp_path, capture_output=True, timeout=60)
        assert failed.returncode, "the hidden tests pass before the patch"
        subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True, timeout=60)
    subprocess.run([sys.executable, "test_hidden.py"], cwd=tmp_path, check=True, timeout=60)
    assert len(json.loads(columns["FAIL_TO_PASS"])) == sum(call.fails for call in first().data.calls)


def test_rows_of_swe_bench_are_refused_in_words() -> None:
    with pytest.raises(SettingsError, match="need their repositories, and an image"):
        Repositories(path="swe_bench.jsonl")


# An agent's command, whose folder is graded


def episode_of(code: str, **settings: Any) -> Episode:
    program = (sys.executable, "-c", CALL + "call()\n" + code)
    tasks = AgentTasks(program=program, taskset=repositories(), deadline=60.0, **settings)
    return first_episode(tasks, "ok", Sampling(max_turns=4, max_new_tokens=20))


def test_an_agent_is_graded_by_its_folder_and_not_by_what_it_prints() -> None:
    repaired = episode_of(f"open({first().data.path!r}, 'w').write({first().data.repaired!r})")
    assert (repaired.status, repaired.reward, repaired.scores["fail_to_pass"]) == (Status.COMPLETED, 1.0, 1.0)
    assert [[span.trained for span in branch.spans] for branch in repaired.branches] == [[False, True]]
    boasting = episode_of("print('done, all tests pass')")
    assert (boasting.status, boasting.reward, boasting.scores["pass_to_pass"]) == (Status.COMPLETED, 0.0, 1.0)


AGENT_CHEATS = {
    "a background process repairs later": "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '60'])",
    "links": "os.remove('test_visible.py'); os.symlink('/etc/passwd', 'test_visible.py'); os.symlink('..', 'up')",
    "pipes": "os.mkfifo('pipe')",
    "too much": "open('big', 'wb').truncate(2**33)",
    "too many": "os.makedirs('d')\nfor i in range(20_001): open(f'd/{i}', 'w').close()",
    "deletes its folder": "import shutil\nshutil.rmtree(os.getcwd())",
    "its folder becomes a link": "import shutil\np = os.getcwd(); shutil.rmtree(p); os.symlink('/etc', p)",
    "its folder becomes a file": "import shutil\np = os.getcwd(); shutil.rmtree(p); open(p, 'w').close()",
    "names that are not text": "open(b'\\xff\\xfe', 'w').close()",
}


@pytest.mark.parametrize("what", taking_turns(AGENT_CHEATS, AGENT_CHEATS.keys() - {"too many"}))
def test_what_an_agent_leaves_is_graded_and_never_an_error(what: str) -> None:
    episode = episode_of(AGENT_CHEATS[what])
    assert (episode.status, episode.reward) == (Status.COMPLETED, 0.0), episode.error


def test_a_failed_command_is_no_reward() -> None:
    episode = episode_of("sys.exit('broken')")
    assert episode.status == Status.FAILED


@pytest.mark.parametrize("settings", [{"program": "tests.endpoint.programs:silent"}, {"folder": "."}])
def test_a_function_or_a_second_folder_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="grades the files of the working folder: program must be a command"):
        AgentTasks(**{"program": ("true",), "taskset": repositories(), **settings})


def test_a_folder_is_packed_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/text").write_bytes(b"x" * 100)
    (tmp_path / "a/same").hardlink_to(tmp_path / "a/b/text")
    (tmp_path / "link").symlink_to("a/b")
    unpack(pack(tmp_path, 1000), tmp_path / "copy")
    assert (tmp_path / "copy/a/same").read_bytes() == (tmp_path / "copy/link/text").read_bytes() == b"x" * 100
    with pytest.raises(FileProblem, match="more than"):
        pack(tmp_path, 99)
