"""Calls as Python writes them, with literals as arguments: LFM2, OLMo 3, Llama 4."""

import ast
import re
import warnings
from typing import Any

from whet.base.strict_json import finite
from whet.chat.notations.parts import SPACE, Tools, skip

_NAME = re.compile(r"[^\W\d][\w.-]*")
LIKE_PYTHON = re.compile(rf"\[\s*{_NAME.pattern}\(")
_WORDS = {"true": True, "false": False, "null": None}  # of JSON, in nested values
_ENDS = 32  # most closing marks that are tried: a text in an argument may contain one
_LONGEST = 100_000  # characters


def python_block(text: str, at: int, after: str, tools: Tools | None) -> tuple[object, int]:
    """Read ``[NAME(KEY=VALUE)]``, or one call in each line. See ``Block``."""
    ends = [match.start() for match in re.finditer(re.escape(after), text[at:])][:_ENDS] if after else []
    problem = ValueError("it is not a list of calls")
    for end in [*(at + end for end in ends), len(text)]:
        try:
            return python_calls(text[at:end]), min(len(text), end + len(after))
        except ValueError as error:
            problem = problem if ends and end == len(text) else error
    raise problem


def python_calls(text: str) -> list[dict[str, object]]:
    """Return the calls of a Python list of them. Raises ``ValueError`` for anything else."""
    start = skip(SPACE, text, 0)
    if len(text) > _LONGEST:
        raise ValueError("it is too long")
    listed = text.startswith("[", start)
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in texts
            module = ast.parse(text[start:].rstrip())
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is not valid Python: {getattr(error, 'msg', 'it is nested too deeply')}") from None
    values = [statement.value if isinstance(statement, ast.Expr) else None for statement in module.body]
    if listed and len(values) == 1 and isinstance(values[0], ast.List):
        values = list(values[0].elts)
    if not values:
        raise ValueError("it is not a list of calls")
    return [_call(value) for value in values]


def _call(value: ast.expr | None) -> dict[str, object]:
    before = ""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub):  # a name with hyphens, to Python a difference
        before, value = ast.unparse(value.left).replace(" ", "") + "-", value.right
    if not isinstance(value, ast.Call) or value.args or not isinstance(value.func, ast.Name | ast.Attribute):
        raise ValueError("it is not a call with named arguments")
    arguments = dict[str, Any]()
    for keyword in value.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("an argument is duplicate, or has no name")
        arguments[keyword.arg] = _literal(keyword.value)
    name = before + ast.unparse(value.func)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:40]} is not the name of a function")
    return {"name": name, "arguments": arguments}


def _literal(value: ast.expr) -> object:
    match value:
        case ast.Constant(value=str() | bool() | int() | None as constant):
            return constant
        case ast.Constant(value=float() as number):
            return finite(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            named = [_literal(key) if key is not None else None for key in keys]
            if not all(isinstance(key, str) for key in named) or len({*named}) < len(named):
                raise ValueError("a key is duplicate, or not a text")
            return dict(zip(named, map(_literal, values), strict=True))
    raise ValueError(f"{ast.unparse(value)[:40]} is not a literal")
