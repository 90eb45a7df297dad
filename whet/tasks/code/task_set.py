"""Programming: the last block of code of a reply is run against tests, in a sandbox. Rows as they are
published (``code_rows``), or small tasks that are made up."""

import asyncio
import operator
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from whet.base.errors import DataError
from whet.core.types import Task
from whet.data.row import read_rows
from whet.sandbox.sandbox import Checks, ProgramLimits, Sandbox
from whet.tasks.base import Environments
from whet.tasks.cases import Kind
from whet.tasks.code.rows import CodeRow
from whet.tasks.code.tests import Test, called, foreign_imports
from whet.tasks.task_source import SourcedTasks

_FENCE = re.compile(r"[ \t]{0,40}(`{3,}|~{3,})(.*)")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py", "py3")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,100}(?:\.[0-9]{0,100})?|\.[0-9]{1,100})")
# What a function of x is to do, its name, its body and the same here; n is a number of the task.
_DRAWN: tuple[tuple[str, str, str, Callable[[int, int], int]], ...] = (
    ("returns x plus {n}", "add", "x + {n}", operator.add),
    ("returns x minus {n}", "subtract", "x - {n}", operator.sub),
    ("returns x times {n}", "multiply", "x * {n}", operator.mul),
    ("returns the larger of x and {n}", "larger", "max(x, {n})", max),
    ("returns True if x is greater than {n}, else False", "greater", "x > {n}", operator.gt),
    ("returns the remainder of x divided by {n}", "remainder", "x % {n}", operator.mod),
)


class Code(SourcedTasks):
    """Tasks whose answers are Python programs."""

    name: ClassVar[str] = "code"
    variety: ClassVar[str] = "numbers"

    prompt: str = "{question}\n\nAnswer with Python code between ``` and ```."
    """What the user says; rows of Gym say it themselves."""
    reward: Literal["all", "share"] = "all"
    """1 where all tests pass, else 0; or the share of tests that pass."""
    sandbox: Literal["required", "none"] = "required"
    """``none`` runs what the model writes with your rights. Shown in red wherever the recipe is."""
    limits: ProgramLimits = ProgramLimits()
    """Of one test."""
    total_s: float = Field(default=60.0, gt=0)
    """Seconds for all tests of an answer; those that are left then have failed."""
    numbers: int = Field(default=1000, ge=10)
    """Size of the numbers in tasks that are made up."""

    def read(self, path: str) -> list[Task]:
        rows = read_rows(path, CodeRow, self.columns)
        for row in rows:
            self._check(row)
        tasks = [self._task(row.question or "", row.checks, row.solution, row.preamble) for row in rows]
        return [replace(task, prompt=row.conversation or task.prompt) for row, task in zip(rows, tasks, strict=True)]

    def _check(self, row: CodeRow) -> None:
        """Raises ``DataError`` for tests that no program could pass here."""
        for test in row.checks:
            if "stdout" in test and len(test["stdout"].encode()) > self.limits.output_kib << 10:
                raise DataError(
                    f"{row.where}: a test wants {len(test['stdout'].encode()):,} bytes of output, and "
                    f"data.limits.output_kib is {self.limits.output_kib}"
                )
            for module in foreign_imports(test["source"]) if "source" in test else ():
                if not any(
                    Path(folder, module + end).exists() for folder in self.limits.readable for end in ("", ".py")
                ):
                    raise DataError(
                        f"{row.where}: a test needs {module!r}, which is not a part of Python: name the folder "
                        "that has it in data.limits.readable"
                    )

    def draw(self, rng: random.Random) -> Task:
        (what, name, body, compute), n = rng.choice(_DRAWN), rng.randint(2, self.numbers)
        given = [0, n, n + 1, *rng.sample(range(3 * self.numbers), 3)]
        question = f"Write a function `{name}(x)` that {what.format(n=n)}."
        solution = f"def {name}(x):\n    return {body.format(n=n)}"
        return self._task(question, [called(name, [x], compute(x, n)) for x in given], solution)

    def _task(self, question: str, tests: list[Test], solution: str | None, preamble: str = "") -> Task:
        asked = self.ask(self.prompt.replace("{question}", question))
        return Task("", asked, {"tests": tests, "solution": solution, "preamble": preamble})

    def gold(self, task: Task) -> str | None:
        solution = task.data["solution"]
        return None if solution is None else _fenced(solution)

    def answers(self, task: Task) -> Iterator[tuple[Kind, str, str, float]]:
        right = task.data["solution"]
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "an empty block", _fenced(""), 0.0
        yield "bad", "no Python", _fenced("the answer is 4"), 0.0
        yield "adversarial", "exit with status 0", _fenced("import os; os._exit(0)"), 0.0
        yield "adversarial", "an endless loop", _fenced("while True: pass"), 0.0
        if right is not None:
            yield "good", "the solution", _fenced(right), 1.0
            yield "good", "the last of two blocks", f"{_fenced('1 / 0')}\nNo:\n{_fenced(right)}", 1.0
            yield "bad", "without a block", right, 0.0
            yield "adversarial", "a right block that is taken back", f"{_fenced(right)}\n{_fenced('1 / 0')}", 0.0

    def open(self) -> "CodeGrading":
        """Raises ``ConfigError`` where programs can't be isolated."""
        return CodeGrading(self)


class CodeGrading(Environments):
    """Runs the tests of one answer after the other, of several answers at the same time."""

    def __init__(self, config: Code) -> None:
        self._config = config
        self._sandbox = Sandbox(config.limits, "none" if config.sandbox == "none" else None)

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        """Raises ``WhetError`` where the sandbox fails: that is nobody's answer."""
        block, tests = program(answer), task.data["tests"]
        if block is None:
            return {"reward": 0.0, "correct": 0.0, "format": 0.0, "passed": 0.0}
        future = "\n".join(_FUTURE.findall(block))
        source = f"{future}\n{task.data['preamble']}\n{_FUTURE.sub('', block)}"
        passed, late, cut = 0, False, False
        end = time.monotonic() + self._config.total_s
        for test in tests:
            ended = await self._sandbox.run(source, test.get("stdin", ""), None if "stdin" in test else Checks(**test))
            late, cut = late or ended["late"], cut or ended["cut"]
            right = ended["status"] == 0 and not ended["late"]
            if right and "stdin" in test:
                right = await asyncio.to_thread(same_output, ended["out"], test["stdout"])
            passed += right
            if time.monotonic() > end or (self._config.reward == "all" and not right):
                break
        correct, share = float(passed == len(tests)), passed / len(tests)
        reward = share if self._config.reward == "share" else correct
        return {"reward": reward, "correct": correct, "format": 1.0, "passed": share} | {
            "late": float(late),
            "cut": float(cut),
        }

    async def close(self) -> None:
        self._sandbox.close()


def program(answer: str) -> str | None:
    """Return the last block of code that is Python or doesn't say what it is, where one says Python the last of these.
    A fence ends with as many marks as it began with, not deeper by four columns, so that a docstring may have fences.

    >>> program("```python\\nf()\\n```\\nIt prints:\\n```\\n42\\n```")
    'f()'
    """
    found = dict[bool, str]()
    mark, kind, indent, lines = "", "", 0, list[str]()
    for line in answer.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        column = len(line) - len(line.lstrip(" \t"))
        if not mark:
            if fence and "`" not in fence[2]:
                mark, kind, indent, lines = fence[1], fence[2].strip(), column, []
            continue
        rest = fence[2].strip() if fence else ""
        if fence and fence[1].startswith(mark) and column < indent + 4 and (not rest or " " in rest):
            language = (kind.split() or [""])[0].strip("{}.").lower()
            if language in ("", *_PYTHON):
                found[language != ""] = "\n".join(lines)
            mark = ""
        else:
            lines.append(line[indent:] if not line[:indent].strip() else line)
    return found.get(True, found.get(False))


def same_output(got: str, wanted: str) -> bool:
    """Whether two outputs are equal, line by line, but for spaces and how numbers are written.

    >>> same_output("1.0 2 \\n", "1 2")
    True
    """
    ours, theirs = got.strip().splitlines(), wanted.strip().splitlines()
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(got: str, wanted: str) -> bool:
    ours, theirs = got.split(), wanted.split()
    return len(ours) == len(theirs) and all(
        one == other or (bool(_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)) and Decimal(one) == Decimal(other))
        for one, other in zip(ours, theirs, strict=True)
    )


def _fenced(source: str) -> str:
    return f"```python\n{source}\n```"
