"""Tests of Python programs, as the sandbox runs them: ``{"stdin", "stdout"}``, or ``Checks`` of functions. Knows no
rows and no files."""

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
# What LiveCodeBench and LeetCode have programs rely on: everything of these, built-in names last.
IMPORTS = "".join(f"from {name} import *\n" for name in _STARS) + f"import {', '.join(_STARS)}\n"

# As LiveCodeBench compares, but for floating-point numbers that are wanted: LeetCode takes what is within 1e-5.
_SAME = """
def same(got, wanted):
    if isinstance(got, (list, tuple)) and isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(got, dict) and isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(got, (int, float)):
        return got == wanted or abs(got - wanted) <= 1e-5 and abs(got - wanted) <= abs(wanted) * 1e-4 + 1e-9
    return got == wanted
"""
_UNSEEN = re.compile(
    r"\b(redirect_stdout|redirect_stderr|capsys|capfd|monkeypatch|mock|patch|tmp_path|sys\.stdout|sys\.stdin|TestCase)\b"
)


def stream(given: Any, wanted: Any) -> Test:
    """The test that a program prints what is wanted. Texts; of APPS, lists of lines."""
    return {"stdin": _text(given), "stdout": _text(wanted)}


def called(name: str, arguments: list[Any], wanted: Any, wrapped: bool = False) -> Test:
    """The test that a function returns the value; ``wrapped``: or what is in that list."""
    json.dumps([arguments, wanted], allow_nan=False)
    either = f" or same(got, {wanted[0]!r})" if wrapped else ""
    source = f"{_SAME}got = function(*{arguments!r})\nassert same(got, {wanted!r}){either}\n"
    return asdict(Checks(source, {"function": name}))


def module_of_tests(source: str, solution: str | None, names: dict[str, str] | None = None) -> Test:
    """Tests that are Python. Names that they don't define are the program's, even built-in ones where the solution has
    functions that are called so; but modules, and what the solution imports, are the real ones. ``names``: others of
    the program's. Raises ``ValueError`` for what can't be judged."""
    try:
        parsed, names = ast.parse(source), dict(names or {})
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"a test is no Python: {error}") from None
    if unseen := _UNSEEN.search(source):
        raise ValueError(f"a test uses {unseen[0]!r}: tests see what functions return, not what they print or read")
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
    kept = [node for node in parsed.body if not (isinstance(node, ast.ImportFrom) and node.module == "solution")]
    if len(kept) < len(parsed.body):
        source = ast.unparse(ast.Module(kept, []))
    own, imports = _defined(solution)
    free = _free(source) - names.keys() - (set(dir(builtins)) - own)
    helped = [imports[name] for name in sorted(free & imports.keys())]
    helped += [f"import {name}" for name in sorted(free - own - imports.keys()) if name in sys.stdlib_module_names]
    free -= imports.keys() | (set(sys.stdlib_module_names) - own)
    names |= {name: name for name in sorted(free)}
    if not names:
        raise ValueError("a test calls nothing of the program's")
    return asdict(Checks("\n".join([*helped, source]), names))


def foreign_imports(source: str) -> Iterator[str]:
    """Yield the modules that tests import and that neither Python nor the sandbox has."""
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
    """The names that a module uses and doesn't define."""
    top = symtable.symtable(source, "tests.py", "exec")
    tables = [top]
    for table in tables:
        tables += table.get_children()
    known = {
        one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported() or one.is_namespace()
    }
    for table in tables:
        known |= {one.get_name() for one in table.get_symbols() if one.is_declared_global() and one.is_assigned()}
    used = {
        one.get_name() for table in tables for one in table.get_symbols()
        if one.is_referenced() and (table is top or one.is_global())
    }  # fmt: skip
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            if node.module not in _STARS:
                raise ValueError(f"a test has 'from {node.module} import *'")
            known |= set(dir(importlib.import_module(node.module)))
    return used - known


def _defined(solution: str | None) -> tuple[set[str], dict[str, str]]:
    """What a solution defines, and how it imports each name that it imports."""
    try:
        body = ast.parse(solution or "").body
    except (SyntaxError, ValueError, RecursionError):
        return set(), {}
    own = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imports = dict[str, str]()
    for node in body:
        if isinstance(node, ast.Assign):
            own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            imports |= {
                (one.asname or one.name).split(".")[0]: ast.unparse(node) for one in node.names if one.name != "*"
            }
    return own, imports


def _text(value: Any) -> str:
    """A text; of APPS, its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("inputs and outputs must be texts where there is no fn_name")
    return value
