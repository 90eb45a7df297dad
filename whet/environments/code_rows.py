"""Rows of coding tasks: HumanEval (arXiv 2107.03374), MBPP (arXiv 2108.07732), and unit tests as NeMo Gym and
LiveCodeBench have them. All become tests of two forms: ``{"stdin", "stdout"}``, and ``Checks`` of functions."""

import ast
import builtins
import json
import re
from dataclasses import asdict
from typing import Any

from pydantic import AliasChoices, Field, model_validator

from whet.data.row import Text
from whet.environments.gym_rows import GymRow
from whet.processes.sandbox import Checks

Test = dict[str, Any]

# As LiveCodeBench compares: a tuple is a list, and floating-point numbers are equal to some digits.
_CALL = """
from math import isclose
def same(got, wanted):
    if isinstance(got, (list, tuple)) and isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(got, float) and isinstance(wanted, (int, float)):
        return isclose(got, wanted, rel_tol=1e-5, abs_tol=1e-8)
    return got == wanted
assert same(function(*ARGUMENTS), WANTED)
"""


class CodeRow(GymRow):
    """A row of any of the three. After validation, ``tests`` holds its tests, at least one."""

    question: Text | None = Field(None, validation_alias=AliasChoices("question", "question_content", "text"))
    prompt: Text | None = None
    entry_point: str | None = None
    test: Text | None = None
    test_setup_code: str = ""
    test_list: list[str] = Field(default=[])
    verifier_metadata: dict[str, Any] | None = None
    solution: str | None = Field(None, validation_alias=AliasChoices("code", "canonical_solution", "solution"))
    tests: list[Test] = Field(default=[])
    preamble: str = ""
    """What the program may rely on, before it: imports and helpers of HumanEval's prompt."""

    @model_validator(mode="after")
    def _can_be_tested(self) -> "CodeRow":
        if self.test is not None and self.prompt is not None and self.entry_point is not None:
            self.preamble = self.prompt[: self.prompt.rindex(f"def {self.entry_point}(")]
            source = f"{self.prompt}\n    pass\n{self.entry_point} = candidate\n{self.test}\ncheck(candidate)\n"
            self.tests = [asdict(Checks(source, {"candidate": self.entry_point}))]
            self.question = f"Complete this function:\n\n```python\n{self.prompt.strip()}\n```"
            self.solution = None if self.solution is None else self.prompt + self.solution
        elif self.test_list:
            self.tests = [_asserted(f"{self.test_setup_code}\n{line}", self.solution) for line in self.test_list]
            self.question = f"{self.question or self.prompt}\n\nIt should pass this test: {self.test_list[0].strip()}"
        else:
            self.tests = unit_tests((self.verifier_metadata or {}).get("unit_tests"))
        if self.question is None and self.conversation is None:
            raise ValueError("a question is missing: 'question', 'prompt' or 'responses_create_params'")
        return self


def unit_tests(given: Any) -> list[Test]:
    """Return the tests of Gym's ``unit_tests``: ``inputs``, ``outputs`` and, for calls, ``fn_name``. Raises
    ``ValueError``, also where there is none: everything would pass."""
    if not isinstance(given, dict) or not given.get("inputs"):
        raise ValueError("there are no tests: fields 'test', 'test_list' or 'verifier_metadata.unit_tests' are missing")
    inputs, outputs, name = given["inputs"], given.get("outputs") or [], given.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"unit_tests has {len(inputs)} inputs and {len(outputs)} outputs")
    if name is None:
        return [{"stdin": _text(one), "stdout": _text(other)} for one, other in zip(inputs, outputs, strict=True)]
    try:
        return [called(name, _values(one), _value(other)) for one, other in zip(inputs, outputs, strict=True)]
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"an input or output of {name!r} is no JSON: {error}") from None


def called(name: str, arguments: list[Any], wanted: Any) -> Test:
    """The test that a function returns the value."""
    source = _CALL.replace("ARGUMENTS", repr(arguments)).replace("WANTED", repr(wanted))
    return asdict(Checks(source, {"function": name}))


def _asserted(source: str, solution: str | None) -> Test:
    """A test of MBPP: names that it doesn't define are the program's, even built-in ones where the solution has
    functions that are called so. Raises ``ValueError``."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError as error:
        raise ValueError(f"a test is no Python: {error}") from None
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    known |= {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in getattr(node, "names", [])}
    known -= set(re.findall(r"^def (\w+)", solution or "", re.MULTILINE))
    return asdict(Checks(source, {node.id: node.id for node in names if node.id not in known}))


def _text(value: Any) -> str:
    """A text; of APPS, its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("inputs and outputs must be texts where there is no fn_name")
    return value


def _values(given: Any) -> list[Any]:
    """The arguments of a call: a list, or a text with one JSON value a line."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)


def _value(given: Any) -> Any:
    """The value wanted: itself, or as JSON; of APPS, in a list of one."""
    return json.loads(given) if isinstance(given, str) else given
