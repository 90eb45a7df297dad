"""Tests of Python programs in the sandbox's form: ``{"stdin", "stdout"}``, or ``Checks`` of functions."""

import ast
import builtins
import importlib
import json
import re
import symtable
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from whet.sandbox import numpy_part
from whet.sandbox.sandbox import Checks

Test = dict[str, Any]

_STARS = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
# LiveCodeBench and LeetCode import everything from these modules for a program, built-in names last.
IMPORTS = "".join(f"from {name} import *\n" for name in _STARS) + f"import {', '.join(_STARS)}\n"

# LiveCodeBench's comparison, except that an expected float admits an error of 1e-5, as on LeetCode.
_SAME = """
def same(got, expected):
    if isinstance(got, (list, tuple)) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same(got[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(got, (int, float)):
        return got == expected or abs(got - expected) <= 1e-5 and abs(got - expected) <= abs(expected) * 1e-4 + 1e-9
    return got == expected
"""
_UNSEEN = re.compile(
    r"\b(redirect_stdout|redirect_stderr|capsys|capfd|monkeypatch|mock|patch|tmp_path|sys\.stdout|sys\.stdin|TestCase)\b"
)


def stream(stdin: object, stdout: object) -> Test:
    """Return the test that a program prints ``stdout``. Both are texts or, in APPS, lists of lines."""
    return {"stdin": _text(stdin), "stdout": _text(stdout)}


def called(name: str, arguments: list[object], expected: Any, wrapped: bool = False) -> Test:
    """Return the test that a function returns the expected value or, if ``wrapped``, the only item of that list."""
    json.dumps([arguments, expected], allow_nan=False)
    either = f" or same(got, {expected[0]!r})" if wrapped else ""
    source = f"{_SAME}got = function(*{arguments!r})\nassert same(got, {expected!r}){either}\n"
    return asdict(Checks(source, {"function": name}))


def module_of_tests(source: str, solution: str | None, names: dict[str, str] | None = None) -> Test:
    """Return the test that a module of Python code runs without an error. Names that the module doesn't define are
    taken from the program, also built-in names that the solution defines; modules, and names that the solution imports,
    are imported. ``names`` adds names of the program. Raises ``ValueError`` for a module that can't be run this way."""
    try:
        parsed, names = ast.parse(source), dict(names or {})
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"a test is not valid Python: {error}") from None
    if unseen := _UNSEEN.search(source):
        raise ValueError(f"a test uses {unseen[0]!r}, but tests can only check what functions return")
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(parsed)):
        raise ValueError("a test asserts nothing, so a function that does nothing would pass it")
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
    kept = [node for node in parsed.body if not (isinstance(node, ast.ImportFrom) and node.module == "solution")]
    if len(kept) < len(parsed.body):
        source = ast.unparse(ast.Module(kept, []))
    defined, imports = names_of(solution)
    free = _free(source) - names.keys() - (set(dir(builtins)) - defined)
    added = [imports[name] for name in sorted(free & imports.keys())]
    added += [f"import {name}" for name in sorted(free - defined - imports.keys()) if name in sys.stdlib_module_names]
    free -= imports.keys() | (set(sys.stdlib_module_names) - defined)
    names |= {name: name for name in sorted(free)}
    if not names:
        raise ValueError("a test calls no function of the program")
    return asdict(Checks("\n".join([*added, source]), names))


def foreign_imports(source: str) -> Iterator[str]:
    """Yield the modules that tests import and that are part of neither Python nor the sandbox."""
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (
            name.split(".")[0] for name in modules if name.split(".")[0] not in (*sys.stdlib_module_names, "numpy")
        )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy"):
            yield from () if hasattr(numpy_part, node.attr) else ("numpy",)


def _free(source: str) -> set[str]:
    """Return the names that a module uses and doesn't define."""
    top = symtable.symtable(source, "tests.py", "exec")
    tables = [top]
    for table in tables:
        tables += table.get_children()
    defined = {
        symbol.get_name()
        for symbol in top.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    for table in tables:
        defined |= {
            symbol.get_name() for symbol in table.get_symbols() if symbol.is_declared_global() and symbol.is_assigned()
        }
    used = {
        symbol.get_name() for table in tables for symbol in table.get_symbols()
        if symbol.is_referenced() and (table is top or symbol.is_global())
    }  # fmt: skip
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            if node.module not in _STARS:
                raise ValueError(f"a test has 'from {node.module} import *'; it must import names one by one")
            defined |= set(dir(importlib.import_module(node.module)))
    return used - defined


def names_of(solution: str | None) -> tuple[set[str], dict[str, str]]:
    """Return the names that a solution defines, and the import statement of each name that it imports."""
    try:
        body = ast.parse(solution or "").body
    except (SyntaxError, ValueError, RecursionError):
        return set(), {}
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imports = dict[str, str]()
    for node in body:
        if isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            imports |= {
                (alias.asname or alias.name).split(".")[0]: ast.unparse(node)
                for alias in node.names
                if alias.name != "*"
            }
    return defined, imports


def _text(value: object) -> str:
    """Return a text, which APPS gives as a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("inputs and outputs must be texts, unless 'fn_name' names the function to call")
    return value
