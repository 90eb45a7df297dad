"""What the author of a ``Config`` wrote about each field: ``Field(description=...)``, the text under it or its comment.

Read from the source only when somebody asks, so that importing stays fast.
"""

import ast
import inspect
import re
import textwrap

from pydantic import BaseModel


def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """The documentation of each field of ``cls``, inherited ones included; fields without any are left out."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            docs |= _written_docs(base)
    docs |= {name: field.description for name, field in cls.model_fields.items() if field.description}
    return {name: " ".join(text.split()) for name, text in docs.items() if name in cls.model_fields}


def _written_docs(cls: type[BaseModel]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        body = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return {}
    if not isinstance(body, ast.ClassDef):
        return {}
    lines = source.splitlines()
    docs = {}
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        below = following.value if isinstance(following, ast.Expr) else None
        text = below.value if isinstance(below, ast.Constant) and isinstance(below.value, str) else ""
        comment = _comment(lines, statement)
        if text or comment:
            docs[statement.target.id] = text or comment
    return docs


def _comment(lines: list[str], statement: ast.AnnAssign) -> str:
    """The comment behind the field, or the comment lines right above it."""
    assert statement.end_lineno is not None
    assert statement.end_col_offset is not None
    behind = lines[statement.end_lineno - 1].encode()[statement.end_col_offset :].decode().strip()
    if behind.startswith("#"):
        return "" if re.match(r"#\s*(noqa|type:)", behind) else behind.lstrip("# ")
    above: list[str] = []
    for line in reversed(lines[: statement.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    return " ".join(above)
