"""Rows of published coding tasks: HumanEval (arXiv 2107.03374) and MBPP (arXiv 2108.07732), also as extended by
EvalPlus; LeetCode's with a class, asserts or a ``check`` function; KodCode; AceCode; and unit tests of LiveCodeBench,
APPS, TACO, CodeContests, DeepCoder, Eurus, Skywork and NeMo Gym. A row whose tests can't be run is an error."""

import base64
import io
import json
import pickle
import re
import zlib
from typing import Any

from pydantic import AliasChoices, Field, model_validator

from whet.base.strict_json import JsonObject
from whet.data.messages import messages_of
from whet.data.row import Text
from whet.tasks.code.tests import IMPORTS, Test, called, module_of_tests, names_of, stream
from whet.tasks.gym.rows import GymRow

_TESTS = (
    "test", "test_list", "test_cases", "tests", "input_output", "public_test_cases", "public_tests", "reward_model",
    "verifier_metadata",
)  # fmt: skip
_PYTHON = 3  # the number of the language in CodeContests


class CodeRow(GymRow):
    """A row of any of these data sets. After validation, ``checks`` holds its tests, at least one."""

    question: Text | None = Field(
        None,
        validation_alias=AliasChoices(
            "question", "question_content", "text", "problem", "problem_description", "description"
        ),
    )
    prompt: Any = None
    entry_point: str | None = None
    starter_code: str | None = None
    import_prefix: str | None = None
    test: Text | None = None
    test_setup_code: str | None = None
    test_imports: list[str] = Field(default=[])
    test_list: list[str] = Field(default=[])
    test_cases: list[str] | None = None
    tests: object = None
    input_output: object = None
    public_test_cases: object = None
    private_test_cases: object = None
    public_tests: JsonObject | None = None
    private_tests: JsonObject | None = None
    generated_tests: JsonObject | None = None
    reward_model: JsonObject | None = None
    verifier_metadata: JsonObject | None = None
    metadata: object = None
    input_file: str | None = None
    output_file: str | None = None
    solution: Any = Field(None, validation_alias=AliasChoices("code", "canonical_solution", "solution", "completion"))
    solutions: Any = None
    checks: list[Test] = Field(default=[], init=False)
    preamble: str = Field("", init=False)
    """Source that is put before the program: imports, and helpers of its prompt."""

    @model_validator(mode="after")
    def _can_be_tested(self) -> "CodeRow":
        self.checks, self.preamble = [], ""
        if isinstance(self.prompt, list):
            try:
                self.responses_create_params = messages_of(self.prompt)
            except ValueError as problem:
                raise ValueError(f"field 'prompt' {problem}") from None
            self.prompt = None
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise ValueError("field 'prompt' must be a text or a list of messages")
        if not isinstance(self.solution, str):
            self.solution = _first(self.solutions)
        if self.test is not None and self.entry_point is not None:
            self._complete(self.prompt or self.import_prefix or "", self.entry_point, self.test)
        elif self.test is not None:
            self._asserts()
        elif self.test_list or self.test_cases:
            self._each_assert(self.test_list or self.test_cases or [])
        else:
            self._units()
        self.preamble += self._without_tested()
        if self.question is None and self.prompt is None and self.conversation is None:
            raise ValueError("the question is missing; give field 'question', 'prompt' or 'responses_create_params'")
        self.question = self.question or self.prompt
        if self.starter_code and self.starter_code.strip() not in (self.question or ""):
            self.question = f"{self.question}\n\nBegin with this code:\n\n```python\n{self.starter_code.strip()}\n```"
        return self

    def _without_tested(self) -> str:
        """Return code that removes the tested names from what the preamble imports, such as ``gcd`` or ``search``: the
        program must define them. Of several names these are the ones that the solution defines."""
        names = {name for check in self.checks for name in check.get("names", {}).values() if name.isidentifier()}
        if len(names) > 1:
            names &= names_of(self.solution)[0]
        return "".join(f"\nglobals().pop({name!r}, None)" for name in sorted(names)) if self.preamble else ""

    def _complete(self, prompt: str, entry: str, test: str) -> None:
        """Read HumanEval's form: the solution continues a prompt, with a function or a method of ``Solution``."""
        name = entry.rpartition(".")[2]
        definitions = list(re.finditer(rf"^([ \t]*)(async )?def {re.escape(name)}\(", prompt, re.MULTILINE))
        head = prompt
        if definitions:
            head = prompt[: definitions[-1].start()]
            if definitions[-1][1]:  # a method: the text before its class
                head = head[: ([match.start() for match in re.finditer(r"^class ", head, re.MULTILINE)] or [0])[-1]]
            self.question = self.question or f"Complete this function:\n\n```python\n{prompt.strip()}\n```"
        in_class = "Solution" in entry or "class Solution" in prompt + (self.starter_code or "")
        self.preamble = (IMPORTS if in_class else "") + head
        if self.solution is not None and definitions and not _is_program(self.solution, name):
            self.solution = prompt + self.solution
        alias = f"{name} = candidate\n" if name.isidentifier() else ""
        source = f"{self.preamble}\n{alias}{test}\ncheck(candidate)\n"
        self.checks = [module_of_tests(source, None, {"candidate": name})]

    def _asserts(self) -> None:
        """Read one module of tests, as in MBPP+, DeepSeek's LeetCode tasks, and KodCode (functions ``test_...``)."""
        source = "\n".join([*self.test_imports, self.test or ""])
        for name, parameters in re.findall(r"^def (test_\w*)\((.*?)\)", source, re.MULTILINE):
            if parameters.strip():
                raise ValueError(f"field 'test': {name} has parameters (pytest fixtures), which are not supported")
            source += f"\n{name}()"
        if re.search(r"^class Test", source, re.MULTILINE):
            raise ValueError("field 'test': tests in classes are not supported")
        if re.search(r"^(import pytest|from pytest)", source, re.MULTILINE):
            raise ValueError("field 'test': tests that import pytest are not supported")
        is_class = "class Solution" in (self.prompt or "") or "Solution(" in source
        self.preamble = IMPORTS if is_class else ""
        self.checks = [module_of_tests(source, self.solution)]
        if self.test_list:
            self._shown(self.test_list[0])
        elif is_class and self.question is None:
            self.question = f"Complete this class:\n\n```python\n{(self.prompt or '').strip()}\n```"

    def _each_assert(self, lines: list[str]) -> None:
        """Read MBPP's form: each line is a test."""
        setup = "\n".join([*self.test_imports, self.test_setup_code or ""])
        self.checks = [module_of_tests(f"{setup}\n{line}", self.solution) for line in lines]
        if any("Solution(" in line for line in lines):
            self.preamble = IMPORTS
        self._shown(lines[0])

    def _shown(self, line: str) -> None:
        self.question = f"{self.question or self.prompt}\n\nIt should pass this test: {line.strip()}"

    def _units(self) -> None:
        """Read inputs and outputs, from the field and in the form of each data set."""
        given: Any = self.input_output or self.tests or (self.verifier_metadata or {}).get("unit_tests")
        field = "input_output" if self.input_output else "tests" if self.tests else "verifier_metadata.unit_tests"
        if self.reward_model is not None:
            given, field = self.reward_model.get("ground_truth"), "reward_model.ground_truth"
        if self.public_test_cases is not None:
            field = "public_test_cases"
            given = [*_json(self.public_test_cases, field), *_private(self.private_test_cases)]
        if self.public_tests is not None:
            if self.input_file or self.output_file:
                raise ValueError("field 'input_file': programs that read and write named files are not supported")
            field, parts = "public_tests", (self.public_tests, self.private_tests, self.generated_tests)
            given = {
                to: [text for part in parts if part for text in part.get(name, [])]
                for to, name in (("inputs", "input"), ("outputs", "output"))
            }
        given = _json(given, field)
        if isinstance(given, dict) and isinstance(given.get("test_code"), str):
            self.import_prefix = given.get("import_prefix") or ""
            self._complete(self.import_prefix, given.get("entry_point") or "", given["test_code"])
            return
        if isinstance(given, dict) and isinstance(given.get("functional"), str):
            self.test, given = given["functional"], None
            entry = re.search(r"^def check\(candidate\)", self.test, re.MULTILINE)
            if entry and "check(" not in self.test[entry.end() :]:
                raise ValueError(f"field {field!r}: 'check' is never called, so the tested function is unknown")
            self._asserts()
            self.preamble = IMPORTS
            return
        if isinstance(given, list) and given and all(isinstance(line, str) for line in given):
            self._each_assert(given)
            return
        if not given:
            raise ValueError(f"there are no tests: fields {', '.join(map(repr, _TESTS))} are missing or empty")
        self.preamble = (self.import_prefix or "") + IMPORTS
        metadata = _json(self.metadata, "metadata") if self.metadata else None
        self.checks = unit_tests(given, metadata.get("func_name") if isinstance(metadata, dict) else None, field)
        name = next(iter(self.checks[0].get("names", {}).values()), None)
        if name and self.conversation is None and name not in f"{self.question}{self.prompt}{self.starter_code}":
            self.question = f"{self.question or self.prompt}\n\nThe function must be called `{name}`."


def unit_tests(given: object, name: str | None = None, field: str = "verifier_metadata.unit_tests") -> list[Test]:
    """Return the tests of an object with ``inputs``, ``outputs`` and, for calls, ``fn_name``; or of a list of objects
    with ``input`` and ``output``. Raises ``ValueError``, also for no tests, and for tests that a program passes which
    does nothing."""
    if isinstance(given, list):
        if not all(isinstance(test, dict) and "input" in test and "output" in test for test in given):
            raise ValueError(f"field {field!r} must be a list of objects with 'input' and 'output'")
        kinds = {_called(test, name) for test in given}
        if len(kinds) > 1:
            raise ValueError(f"field {field!r} must hold tests of one kind: calls of one function, or of a program")
        inputs, outputs = [test["input"] for test in given], [test["output"] for test in given]
        given = {"inputs": inputs, "outputs": outputs, "fn_name": next(iter(kinds), None)}
        if given["fn_name"] == "":
            raise ValueError(f"field {field!r}: the name of the function is missing ('fn_name' or 'func_name')")
    if not isinstance(given, dict) or not given.get("inputs"):
        raise ValueError(f"there are no tests in field {field!r}")
    inputs, outputs, name = given["inputs"], given.get("outputs") or [], given.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"field {field!r} has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if name is None:
        tests = [stream(*pair) for pair in pairs]
        if not any(test["stdout"].strip() for test in tests):
            raise ValueError(f"field {field!r}: no test expects any output, so every silent program would pass")
        return tests
    try:
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)  # as in APPS
        calls = [(_values(arguments), _value(output)) for arguments, output in pairs]
        tests = [called(name, arguments, output, wrapped) for arguments, output in calls]
    except (TypeError, ValueError) as error:
        raise ValueError(f"an input or output of {name!r} is not JSON: {error}") from None
    if all(output is None for _, output in calls):
        raise ValueError(f"field {field!r}: every call of {name!r} should return null, as an empty function does")
    return tests


def _called(test: JsonObject, name: str | None) -> str | None:
    """Return the function that a test calls: empty if it isn't named, None for a test of printed output."""
    metadata, kind = test.get("metadata"), test.get("testtype", test.get("type"))
    name = test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, dict) else None) or name
    return (name or "") if kind in ("functional", "function_call") else name if kind is None else None


def _is_program(source: str, name: str) -> bool:
    """Return whether a solution is a whole program, not a continuation of its prompt."""
    return bool(re.search(rf"^([ \t]*)(async )?def {re.escape(name)}\(", source, re.MULTILINE))


def _first(solutions: object) -> str | None:
    """Return the first Python solution of a list, of JSON of a list, or of CodeContests' two lists; None without."""
    if isinstance(solutions, str):
        try:
            solutions = json.loads(solutions)
        except ValueError:
            return None
    if isinstance(solutions, dict):
        pairs = zip(solutions.get("language", []), solutions.get("solution", []), strict=False)
        solutions = [source for language, source in pairs if language == _PYTHON]
    sources = solutions if isinstance(solutions, list) else []
    return next((source for source in sources if isinstance(source, str)), None)


def _json(given: object, field: str) -> Any:
    """Return a value that may be given as a text of JSON."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given, parse_constant=_no_number) if given.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"field {field!r} is not JSON: {error}") from None


def _no_number(text: str) -> object:
    raise ValueError(f"{text} can't be compared")


class _PlainUnpickler(pickle.Unpickler):
    """Reads texts, numbers and containers. A pickle that names a class or function is an error."""

    def find_class(self, module: str, name: str) -> object:
        raise ValueError(f"it is a pickle that would load {module}.{name}")


def _private(given: object) -> list[object]:
    """Return LiveCodeBench's private tests, from JSON or from pickled, compressed JSON in base64."""
    field = "private_test_cases"
    if not given or not isinstance(given, str) or given.lstrip().startswith("["):
        return list(_json(given, field) or [])
    try:
        return list(_json(_PlainUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(given)))).load(), field))
    except (ValueError, TypeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise ValueError(f"field {field!r} can't be read: {error}") from None


def _values(given: Any) -> list[object]:
    """Return the arguments of a call, from a list or a text with a JSON value on each line."""
    if isinstance(given, str):
        return [json.loads(line, parse_constant=_no_number) for line in given.splitlines()]
    return list(given)


def _value(given: object) -> object:
    """Return the expected value of a call, given as itself or as JSON."""
    return json.loads(given, parse_constant=_no_number) if isinstance(given, str) else given
