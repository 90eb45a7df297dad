"""Programming tasks: the last block of code of a reply is tested in a sandbox. The tasks are rows of published data
sets (``rows.py``), or generated from a seed."""

import asyncio
import operator
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from whet.tasks.scores import FORMAT, NamedScore
from whet.tasks.task_source import SourcedTasks

_FENCE = re.compile(r"[ \t]{0,40}(`{3,}|~{3,})(.*)")
_FUTURE = re.compile(r"^from __future__ import (?:\([^)]*\)|.*)", re.MULTILINE)
_PYTHON = ("python", "python3", "py", "py3")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,100}(?:\.[0-9]{0,100})?|\.[0-9]{1,100})")
# Of a generated function of x: the description, name, body, and the same computation; n is a number of the task.
_DRAWN: tuple[tuple[str, str, str, Callable[[int, int], int]], ...] = (
    ("returns x plus {n}", "add", "x + {n}", operator.add),
    ("returns x minus {n}", "subtract", "x - {n}", operator.sub),
    ("returns x times {n}", "multiply", "x * {n}", operator.mul),
    ("returns the larger of x and {n}", "larger", "max(x, {n})", max),
    ("returns True if x is greater than {n}, else False", "greater", "x > {n}", operator.gt),
    ("returns the remainder of x divided by {n}", "remainder", "x % {n}", operator.mod),
)


SCORES = FORMAT | {name: NamedScore() for name in ("passed", "late", "cut")}


@dataclass(frozen=True, slots=True)
class Tested:
    """The tests of a program, and a program that passes them."""

    tests: list[Test]
    solution: str | None
    preamble: str  # code before the program


class Code(SourcedTasks[Tested]):
    """Tasks whose answers are Python programs."""

    named_scores = SCORES

    name: ClassVar[str] = "code"
    variety: ClassVar[str] = "numbers"

    prompt: str = "{question}\n\nAnswer with Python code between ``` and ```."
    """The user message. ``{question}`` is replaced by the question. Rows of Gym have their own."""
    reward: Literal["all", "share"] = "all"
    """``all``: 1 if all tests pass, else 0. ``share``: the share of tests that pass."""
    sandbox: Literal["required", "none"] = "required"
    """``none`` runs the model's programs with your permissions. It is shown in red wherever the recipe is."""
    limits: ProgramLimits = ProgramLimits()
    """The limits of one test."""
    total_s: float = Field(default=60.0, gt=0)
    """Seconds for all tests of an answer. Tests that have not run by then count as failed."""
    numbers: int = Field(default=1000, ge=10)
    """Largest number in a generated task."""

    def read(self, path: str) -> list[Task[Tested]]:
        rows = read_rows(path, CodeRow, self.columns)
        for row in rows:
            self._check(row)
        tasks = [self._task(row.question or "", row.checks, row.solution, row.preamble) for row in rows]
        return [replace(task, prompt=row.conversation or task.prompt) for row, task in zip(rows, tasks, strict=True)]

    def _check(self, row: CodeRow) -> None:
        """Raise ``DataError`` for a test that no program could pass within the limits."""
        for test in row.checks:
            if "stdout" in test and len(test["stdout"].encode()) > self.limits.output_kib << 10:
                raise DataError(
                    f"{row.where}: a test expects {len(test['stdout'].encode()):,} bytes of output, more than "
                    f"data.limits.output_kib = {self.limits.output_kib} allows; raise the limit"
                )
            for module in foreign_imports(test["source"]) if "source" in test else ():
                if not any(
                    Path(folder, module + end).exists() for folder in self.limits.readable for end in ("", ".py")
                ):
                    raise DataError(
                        f"{row.where}: a test imports {module!r}, which is not part of Python; add the folder "
                        "that contains it to data.limits.readable"
                    )

    def draw(self, rng: random.Random) -> Task[Tested]:
        (what, name, body, compute), n = rng.choice(_DRAWN), rng.randint(2, self.numbers)
        inputs = [0, n, n + 1, *rng.sample(range(3 * self.numbers), 3)]
        question = f"Write a function `{name}(x)` that {what.format(n=n)}."
        solution = f"def {name}(x):\n    return {body.format(n=n)}"
        return self._task(question, [called(name, [x], compute(x, n)) for x in inputs], solution)

    def _task(self, question: str, tests: list[Test], solution: str | None, preamble: str = "") -> Task[Tested]:
        asked = self.ask(self.prompt.replace("{question}", question))
        return Task("", asked, Tested(tests, solution, preamble))

    def gold(self, task: Task[Tested]) -> str | None:
        solution = task.data.solution
        return None if solution is None else _fenced(solution)

    def answers(self, task: Task[Tested]) -> Iterator[tuple[Kind, str, str, float]]:
        right = task.data.solution
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "an empty block", _fenced(""), 0.0
        yield "bad", "prose in a block", _fenced("the answer is 4"), 0.0
        yield "adversarial", "exit with status 0", _fenced("import os; os._exit(0)"), 0.0
        yield "adversarial", "an endless loop", _fenced("while True: pass"), 0.0
        if right is not None:
            yield "good", "the solution", _fenced(right), 1.0
            yield "good", "the last of two blocks", f"{_fenced('1 / 0')}\nNo:\n{_fenced(right)}", 1.0
            yield "bad", "without a block", right, 0.0
            yield "adversarial", "a right block that is taken back", f"{_fenced(right)}\n{_fenced('1 / 0')}", 0.0

    def open(self) -> "CodeGrading":
        """Return the graders. Raises ``ConfigError`` on a machine that can't isolate programs."""
        return CodeGrading(self)


class CodeGrading(Environments[Tested]):
    """Runs the tests of an answer one after the other; the tests of several answers run in parallel."""

    named_scores = SCORES

    def __init__(self, config: Code) -> None:
        self._config = config
        self._sandbox = Sandbox(config.limits, "none" if config.sandbox == "none" else None)

    async def grade(self, task: Task[Tested], answer: str) -> dict[str, float]:
        """Return the scores. Raises ``WhetError`` if the sandbox fails, which is not the fault of an answer."""
        block, tests = program(answer), task.data.tests
        if block is None:
            return {"reward": 0.0, "correct": 0.0, "format": 0.0, "passed": 0.0}
        future = "\n".join(_FUTURE.findall(block))
        source = f"{future}\n{task.data.preamble}\n{_FUTURE.sub('', block)}"
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
    """Return the last block marked as Python or, without one, the last unmarked block; None without either. A fence is
    closed by as many marks as it began with, indented by less than four more columns, so a docstring may have fences.

    >>> program("```python\\nf()\\n```\\nIt prints:\\n```\\n42\\n```")
    'f()'
    """
    blocks = dict[bool, str]()  # the last block, by whether it is marked as Python
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
                blocks[language != ""] = "\n".join(lines)
            mark = ""
        else:
            lines.append(line[indent:] if not line[:indent].strip() else line)
    return blocks.get(True, blocks.get(False))


def same_output(output: str, expected: str) -> bool:
    """Return whether two outputs are equal line by line, apart from spaces and the notation of numbers.

    >>> same_output("1.0 2 \\n", "1 2")
    True
    """
    lines, expected_lines = output.strip().splitlines(), expected.strip().splitlines()
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(line: str, expected: str) -> bool:
    words, expected_words = line.split(), expected.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    return bool(_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)) and Decimal(word) == Decimal(expected)


def _fenced(source: str) -> str:
    return f"```python\n{source}\n```"
