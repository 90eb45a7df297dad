"""Pydantic's complaints about a recipe, said again with the key, the line, what was expected and the likely cure."""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from whet.config.base import Config
from whet.config.docs import field_docs
from whet.config.nearest import did_you_mean
from whet.config.problems import Problem
from whet.config.schema import Place, describe_constraints, describe_type
from whet.config.tree import Node, Path, dotted, nearest_node
from whet.config.yaml_text import parse_number

_WRONG_TYPE = re.compile(r"_type$|_parsing$|^int_from_float$|^literal_error$|^enum$|^is_instance_of$|^model_attributes")
_LIMITS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "finite_number": "a finite number",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "string_pattern_mismatch": "a text matching {pattern}",
}


def problems_of(error: ValidationError, root: type[Config], tree: Node) -> list[Problem]:
    """One problem for each key that is wrong, in the order of the recipe's fields."""
    by_path: dict[Path, list[dict[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_path_in(tree, detail["loc"], detail["type"]), []).append(dict(detail))
    # A union reports each of its alternatives; deeper keys say more than "not a mapping" at the key above.
    return [_problem(path, details, root, tree) for path, details in by_path.items()]


def _path_in(tree: Node, loc: Iterable[str | int], kind: str) -> Path:
    """Pydantic's location without the names of union members, which are not in the recipe."""
    parts, path = list(loc), ()  # type: tuple[list[str | int], Path]
    node = tree
    for index, part in enumerate(parts):
        if isinstance(node.value, dict) and str(part) in node.value:
            node, path = node.value[str(part)], (*path, str(part))
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node, path = node.value[part], (*path, part)
        elif index == len(parts) - 1 and kind == "missing":
            path = (*path, part)
    return path


def place_of(root: type[Config], tree: Node, path: Path) -> tuple[Place | None, Place]:
    """What rules the value at ``path`` (None when its key is unknown), and what rules the mapping or list around it."""
    above, here = Place(root), Place(root)
    for depth, key in enumerate(path):
        around, rest = nearest_node(tree, path[:depth])
        found = here.children(None if rest else around, key)
        above = here
        if not found:
            return None, above
        here = found[0]
    return here, above


def _problem(path: Path, details: list[dict[str, Any]], root: type[Config], tree: Node) -> Problem:
    node, rest = nearest_node(tree, path)
    place, above = place_of(root, tree, path)
    detail = details[0]
    kind, key = detail["type"], dotted(path)
    if kind == "extra_forbidden":
        around, _ = nearest_node(tree, path[:-1])
        return Problem(key, node.origin.where, unknown_key(str(path[-1]), above.known_keys(around)))
    if kind == "missing":
        wanted = f"; expected {describe_type(place)}" if place else ""
        about = field_docs(place.owner).get(place.name) if place and place.owner else None
        return Problem(key, node.origin.where, f"is missing{wanted}" + (f" ({about})" if about else ""))
    if kind in ("value_error", "assertion_error"):
        return Problem(key, node.origin.where, str(detail["ctx"]["error"]))
    where = node.origin.where if not rest else f"default of {key}"
    if place is not None and all(_WRONG_TYPE.search(d["type"]) for d in details):
        return Problem(key, where, f"expected {describe_type(place)}, got {got(node)}{_cure(node, place)}")
    limits = [d for d in details if d["type"] in _LIMITS]
    if limits:
        wanted = " or ".join(dict.fromkeys(_LIMITS[d["type"]].format(**_whole(d.get("ctx", {}))) for d in limits))
        limited = [word for word in describe_constraints(place) if word not in wanted] if place else []
        return Problem(key, where, f"expected {' and '.join([wanted, *limited])}, got {got(node)}")
    return Problem(key, where, detail["msg"])


def _whole(context: dict[str, Any]) -> dict[str, Any]:
    return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in context.items()}


def unknown_key(name: str, known: list[str]) -> str:
    hint = " 'extends' stands only at the top of a file." if name == "extends" else did_you_mean(name, known)
    return f"unknown key.{hint} Known: {', '.join(known) or 'none'}"


def got(node: Node) -> str:
    """The value in words, as it was written."""
    value = node.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null (nothing)"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else value[:57] + "..."
        return f"text {shown!r}" + (" in quotes" if node.quoted and parse_number(value) is not None else "")
    if isinstance(value, dict):
        return "a mapping"
    return f"a list of {len(value)}" if isinstance(value, list) else f"the number {value!r}"


def _cure(node: Node, place: Place) -> str:
    """What to change, where the mistake is a common one."""
    value = node.value
    types = [annotation for annotation, _ in place.alternatives()]
    if isinstance(value, str):
        number = parse_number(value)
        if number is not None and (float in types or (int in types and isinstance(number, int))):
            return "; remove the quotes"
        if bool in types:
            if value.lower() in ("true", "false"):
                return "; remove the quotes"
            if value.lower() in ("yes", "on", "y"):
                return "; write true (only true and false are booleans)"
            if value.lower() in ("no", "off", "n"):
                return "; write false (only true and false are booleans)"
        return did_you_mean(value, _choices(place)).replace(" Did", ". Did")
    if isinstance(value, float) and value.is_integer() and int in types:
        return f"; write {int(value)}"
    if isinstance(value, bool | int | float) and str in types:
        return "; put it in quotes"
    return ""


def _choices(place: Place) -> list[str]:
    return re.findall(r"'([^']+)'", describe_type(place))
