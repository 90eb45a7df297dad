"""The string below a field of settings, read from the source only when it is to be printed.

pydantic would read them all while it makes the classes (``use_attribute_docstrings``): a tenth of a second of every
start, for texts that only errors, ``--explain`` and the site print.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def documentation(model: type[BaseModel], name: str) -> str:
    """Return what the declaration of a field says about it, in one line. Returns "" if it says nothing, or if there is
    no source, as of a class that was typed at a prompt."""
    if given := model.model_fields[name].description:
        return " ".join(given.split())
    owners = (cls for cls in model.__mro__ if name in inspect.get_annotations(cls))
    return _strings(next(owners)).get(name, "")


@cache
def _strings(cls: type) -> Mapping[str, str]:
    """Return the strings directly below annotated names in the body of the class."""
    try:
        statement = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    strings: dict[str, str] = {}
    for declared, below in pairwise(getattr(statement, "body", [])):
        match declared, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                strings[name] = " ".join(text.split())
    return strings
