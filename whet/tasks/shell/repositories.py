"""Repair of toy repositories: a bug in one or two small files of Python, described by an example, and hidden tests.

The hidden tests are calls. In a new runtime, with nothing but the work folder, a script makes the calls and writes what
they return; it never has the expected results, which are compared in this process. So code of the policy that runs
during the tests can earn the reward only by returning the right results for arguments that it has not seen.
"""

import difflib
import hashlib
import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from pydantic import Field, model_validator

from whet.base.errors import ConfigError
from whet.core.types import Task
from whet.shells.places import LOGS, TESTS
from whet.shells.runtime import FileProblem, RuntimeFailure
from whet.tasks.base import Environments
from whet.tasks.cases import Answer
from whet.tasks.scores import NamedScore
from whet.tasks.shell.base import FILES_SCORES, TasksInShell, archive_of, prepared
from whet.tasks.shell.toy_code import SAMPLES, Arguments, result_of
from whet.tasks.tools.base import SeededToolTasks, solution

_NAMES = ("basics", "helpers", "tools", "numbers_and_words", "core", "shared", "common", "lib")
_FAILING, _PASSING = 4, 2  # hidden calls of the function with the bug, and of each function
_RESULTS = f"{LOGS}/results.jsonl"
_CALLS = f"""
import importlib, json, sys
with open("{TESTS}/calls.json") as file:
    folder, calls = json.load(file)
sys.path.insert(0, folder)
with open("{_RESULTS}", "w") as results:
    for module, function, arguments in calls:
        try:
            line = json.dumps(getattr(importlib.import_module(module), function)(*arguments))
        except Exception:
            line = ""
        print(line, file=results, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A hidden test: a call and its result. ``fails``: with the bug it returns something else."""

    module: str
    function: str
    arguments: Arguments
    result: object
    fails: bool

    @property
    def name(self) -> str:
        """The name of the test in a row of SWE-bench."""
        return f"test_hidden.{self.function}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Repository:
    """The files with the bug, the file without it, and the hidden tests."""

    before: dict[str, str]
    path: str  # of the file with the bug
    repaired: str  # its text without the bug
    calls: tuple[Call, ...]
    problem: str


class Repositories(TasksInShell[Repository], SeededToolTasks[Repository]):
    """Repair a small repository. The reward is 1 if all hidden tests pass."""

    named_scores = FILES_SCORES | {"fail_to_pass": NamedScore(), "pass_to_pass": NamedScore()}

    system: str | None = "Fix the bug in the repository in the current folder with bash. Then answer: done"
    functions: int = Field(default=4, ge=2, le=len(SAMPLES))
    """Functions of a repository, in one or two files."""
    path: str | None = None
    """Rows of SWE-bench are refused, with the reason."""

    @model_validator(mode="after")
    def _no_rows(self) -> Self:
        if self.path is not None:
            raise ValueError(
                f"path = {self.path}: rows of SWE-bench (repo, base_commit, test_patch) need their repositories, and "
                "an image with the packages of their tests, which whet does not download. Write them as task folders "
                "(data.type=task_folders), or leave path out for toy repositories"
            )
        return self

    def open(self) -> Environments[Repository]:
        environments = super().open()
        runtime = self.runtime.open()
        try:
            if runtime.run("python3 -I -c ''").status:
                raise ConfigError("repositories need python3 in the runtime of the shell, such as /usr/bin/python3")
        finally:
            runtime.close()
        return environments

    def files(self, task: Task[Repository]) -> bytes:
        return archive_of(task.data.before)

    def graded(self, task: Task[Repository], archive: bytes) -> dict[str, float]:
        """Return 1 if all hidden tests pass; the scores are the shares of tests that pass."""
        calls = task.data.calls
        returned = self._returned(task, archive)
        passes = [line == _plain(call.result) for line, call in zip(returned, calls, strict=True)]
        repaired = [right for right, call in zip(passes, calls, strict=True) if call.fails]
        kept = [right for right, call in zip(passes, calls, strict=True) if not call.fails]
        scores = {"reward": float(all(passes)), "correct": float(all(passes)), "shell_unreadable": 0.0}
        return scores | {"fail_to_pass": sum(repaired) / len(repaired), "pass_to_pass": sum(kept) / len(kept)}

    def unreadable(self) -> dict[str, float]:
        return super().unreadable() | {"fail_to_pass": 0.0, "pass_to_pass": 0.0}

    def gold(self, task: Task[Repository]) -> Answer:
        command = f"cat > {task.data.path} <<'END'\n{task.data.repaired}END"
        return solution(("bash", {"command": command}), answer="done")

    def draw(self, rng: random.Random) -> tuple[str, Repository]:
        repository = _repository(rng, self.functions)
        return f"{repository.problem}\nThe tests in test_visible.py may be run: python3 -m unittest", repository

    def _returned(self, task: Task[Repository], archive: bytes) -> list[str]:
        """Return the result of each hidden call in the repository of an archive; empty for a call without one."""
        calls = [(call.module, call.function, call.arguments) for call in task.data.calls]
        fresh = prepared(self.runtime, archive, self.work(task))
        try:
            try:
                fresh.write(f"{TESTS}/calls.json", json.dumps([self.work(task), calls]).encode())
                fresh.write(f"{TESTS}/calls.py", _CALLS.encode())
            except FileProblem as problem:
                raise RuntimeFailure(f"the hidden tests can't be written: {problem}") from None
            fresh.run(f"exec python3 -I -B {TESTS}/calls.py", folder=TESTS)
            try:
                lines = fresh.read(_RESULTS).decode("utf-8", "replace").split("\n")
            except FileProblem:
                lines = []
        finally:
            fresh.close()
        return [_read(line) for line in [*lines, *[""] * len(calls)][: len(calls)]]


def row(task: Task[Repository]) -> dict[str, str]:
    """Return a task in SWE-bench's columns. ``repo`` and ``base_commit`` name nothing on the network."""
    repository = task.data
    fails, keeps = ([call.name for call in repository.calls if call.fails is fails] for fails in (True, False))
    hidden = "".join(
        f"assert {call.module}.{call.function}(*{call.arguments!r}) == {call.result!r}\n" for call in repository.calls
    )
    modules = "".join(f"import {name}\n" for name in sorted({call.module for call in repository.calls}))
    return {
        "instance_id": task.uid.replace("/", "-"),
        "repo": "whet/toy",
        "base_commit": hashlib.sha1(json.dumps(asdict(repository)).encode()).hexdigest(),
        "problem_statement": repository.problem,
        "patch": _diff(repository.path, repository.before[repository.path], repository.repaired),
        "test_patch": _diff("test_hidden.py", "", f"{modules}\n{hidden}"),
        "FAIL_TO_PASS": json.dumps(fails),
        "PASS_TO_PASS": json.dumps(keeps),
    }


def _repository(rng: random.Random, functions: int) -> Repository:
    names = rng.sample(sorted(SAMPLES), functions)
    broken = rng.choice(names)
    cut = rng.randint(1, functions)
    modules = dict(zip(rng.sample(_NAMES, 2), (names[:cut], names[cut:]), strict=True))
    place = {name: module for module, inside in modules.items() for name in inside}
    sources = {name: sample.source for name, sample in SAMPLES.items()} | {broken: SAMPLES[broken].broken}
    before = {
        f"{module}.py": "\n\n".join(sources[name] for name in inside) for module, inside in modules.items() if inside
    }
    repaired = "\n\n".join(SAMPLES[name].source for name in modules[place[broken]])
    calls = _calls(rng, broken, place[broken])
    shown, *failing = [call for call in calls if call.fails]
    passing = sorted((call for call in calls if not call.fails), key=lambda call: call.result == shown.result)
    hidden = failing[:_FAILING] + passing[:_PASSING]  # other results first: no constant passes all tests
    visible = [shown]
    for name in names:
        if name != broken:
            first, *others = (replace(call, fails=False) for call in _calls(rng, name, place[name]))
            visible.append(first)
            hidden += others[:_PASSING]
    before["test_visible.py"] = _visible_tests(visible)
    problem = (
        f"{shown.module}.{shown.function}({', '.join(map(repr, shown.arguments))}) should return {shown.result!r}, and "
        f"does not: it {_does(broken, shown.arguments)}."
    )
    return Repository(before, f"{place[broken]}.py", repaired, tuple(hidden), problem)


def _calls(rng: random.Random, name: str, module: str) -> list[Call]:
    """Return different calls of a function, with its right results, and whether its bug changes these."""
    sample, drawn = SAMPLES[name], dict[str, Call]()
    for _ in range(60):
        arguments = sample.draw(rng)
        result = result_of(sample.source, name, arguments)
        fails = _plain(result) != _plain(result_of(sample.broken, name, arguments))
        drawn[json.dumps(arguments)] = Call(module, name, arguments, result, fails)
    return list(drawn.values())


def _does(name: str, arguments: Arguments) -> str:
    """Return what a function with its bug does, as in "returns 3"."""
    result = result_of(SAMPLES[name].broken, name, arguments)
    return f"raises {result['raises']}" if isinstance(result, dict) else f"returns {result!r}"


def _visible_tests(calls: list[Call]) -> str:
    modules = "".join(f"import {name}\n" for name in sorted({call.module for call in calls}))
    tests = "".join(
        f"\n    def test_{call.function}_{number}(self):\n        self.assertEqual({call.module}.{call.function}"
        f"(*{call.arguments!r}), {call.result!r})\n"
        for number, call in enumerate(calls, 1)
    )
    return f"import unittest\n\n{modules}\n\nclass Tests(unittest.TestCase):{tests}"


def _diff(path: str, old: str, new: str) -> str:
    sides = ("/dev/null" if not old else f"a/{path}", f"b/{path}")
    return "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), *sides))


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _read(line: str) -> str:
    """Return a line of results in the form of ``_plain``; empty for a line that is not JSON."""
    try:
        return _plain(json.loads(line))
    except (ValueError, RecursionError):
        return ""
