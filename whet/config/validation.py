"""Messages about mistakes in a recipe: pydantic's errors, reworded with key, line and the likely fix."""

import re
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from whet.config.base import Config
from whet.config.issues import ConfigIssue, SettingsError, did_you_mean
from whet.config.schema import Place, find_place
from whet.config.tree import Node, Path, dotted, from_plain
from whet.config.words import choices, describe, limits
from whet.config.yaml_text import plain_value

_WRONG_TYPE = re.compile(r"_type$|_parsing$|^int_from_float$|^literal_error$|^enum$|^is_instance_of$|^model_attributes")
_LIMIT = re.compile(
    r"^(greater|less)_than|^multiple_of$|^finite_number$|^(string_)?too_(short|long)$|^string_pattern_mismatch$"
)
_NAME = re.compile(r"[a-z]\w*(?:\.\w+)*")  # of a setting, in a message
_BOOLEANS = dict.fromkeys(("yes", "on", "y", "true"), "true") | dict.fromkeys(("no", "off", "n", "false"), "false")


def settings_error(error: ValidationError, root: type[Config], settings: Mapping[str, object]) -> SettingsError:
    """Return the error about settings given in Python to a class."""
    return SettingsError(issues_of(error, root, from_plain(settings, root.__name__)))


def issues_of(error: ValidationError, root: type[Config], tree: Node) -> list[ConfigIssue]:
    """Return one issue for each key that is wrong, in the order of the recipe's fields."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        path: Path = ()
        for part in map(str, detail["loc"]):
            if not tree.find((*path, part))[1]:  # other parts name a member of a union and are not in the recipe
                path = (*path, part)
        if detail["type"] == "missing":
            path = (*path, str(detail["loc"][-1]))
        by_path.setdefault(path, []).append(detail)
    issues = []
    for path, details in by_path.items():
        inside = any(other[: len(path)] == path != other for other in by_path)
        if inside and details[0]["type"] == "too_short":  # only because wrong items don't count
            continue
        of_parts = details[0]["type"] == "value_error" and bool(tree.find(path)[0].children())
        for line in _message(path, details, root, tree).splitlines():
            where = _place(path, line, tree) if of_parts else tree.find(path)[0].where
            issues.append(ConfigIssue(dotted(path), where, line))
    return issues


def _place(path: Path, message: str, tree: Node) -> str:
    """Return the place of a message about parts of a recipe that don't fit together, or of one of its sections. The
    first override that gives a setting named in the message is the place, because a file mostly fits together without
    overrides. Otherwise it is the section or, without one, the setting at the start of the message."""
    for name in _NAME.findall(message):
        for full in ((*path, *name.split(".")), tuple(name.split("."))):
            node, rest = tree.find(full)
            # A section's name is often an ordinary word: "the model".
            if not rest and not node.children() and node.where.startswith("override "):
                return node.where
    return tree.find(path or tuple(message.partition(" ")[0].split(".")))[0].where


def unknown_key(root: type[Config], tree: Node, path: Path) -> str:
    """Return the message about an unknown key."""
    around = find_place(root, tree, path[:-1])
    keys = around.known_keys(tree.find(path[:-1])[0]) if around else []
    below = (dotted(leaf) for leaf in tree.leaves() if leaf[-1] == path[-1] and leaf != path)
    elsewhere = _elsewhere(root, tree, path)
    if elsewhere and elsewhere != dotted(path) and (len(path) == 1 or not did_you_mean(path[-1], keys)):
        return f"unknown key. The setting here is {elsewhere}"
    hint = did_you_mean(path[-1], keys) or _of_another_type(around, tree, path, keys)
    hint = hint or next((f" Did you mean {name!r}?" for name in below), "")
    if path[-1] == "extends":
        hint = " 'extends' is allowed only at the top level of a file."
    return f"unknown key.{hint} Known: {', '.join(keys) or 'none'}"


def _elsewhere(root: type[Config], tree: Node, path: Path) -> str:
    """Return the names here of other libraries' settings at or below the path."""
    node, rest = tree.find(path)
    leaves = [(*path, *leaf) for leaf in ([()] if rest else node.leaves())]
    return "; ".join(dict.fromkeys(answer for leaf in leaves if (answer := root.other_name(dotted(leaf)))))


def _of_another_type(around: Place | None, tree: Node, path: Path, keys: list[str]) -> str:
    """Return a hint to another type of this component, or of a component directly below, that has the key."""
    node = tree.find(path[:-1])[0]
    if around is not None and path[:-1] and (types := around.alternatives_with(path[-1])):
        more = f" (also of {', '.join(types[1:])})" if types[1:] else ""
        section = dotted(path[:-1])
        return f" {section} = {node.kind} does not have it; it is a setting of {section} = {types[0]}{more}."
    for name in (name for name in keys if name != "type"):
        if (
            around is not None
            and (below := around.child(node, name)) is not None
            and (types := below.alternatives_with(path[-1]))
        ):
            chosen = f"{{type: {types[0]}, {path[-1]}: ...}}"
            others = f" (also of {', '.join(types[1:])})" if types[1:] else ""
            return f" It is a setting of {name} = {types[0]}{others}: write {name}: {chosen}."
    return ""


def _message(path: Path, details: list[ErrorDetails], root: type[Config], tree: Node) -> str:
    kind, place, node = details[0]["type"], find_place(root, tree, path), tree.find(path)[0]
    if kind == "invalid_key" or details[0]["loc"][-1:] == ("[key]",):  # given in Python: in YAML a key is text
        return "a key must be text in quotes"
    if kind == "extra_forbidden":
        return unknown_key(root, tree, path)
    if kind == "missing":
        about = f" ({place.about.replace('``', '`')})" if place and place.about else ""
        return f"is missing; expected {describe(place.annotation)}{about}" if place else "is missing"
    if kind in ("value_error", "assertion_error"):
        return str(details[0]["ctx"]["error"])
    if place is not None and all(_WRONG_TYPE.search(detail["type"]) for detail in details):
        if isinstance(node.value, list) and details[0]["type"] == "tuple_type":  # given in Python: in YAML it is right
            return f"expected a tuple, got a list; write {_shown(tuple(node.plain()))}"
        if isinstance(node.value, str) and details[0]["type"] in ("tuple_type", "list_type"):
            return _not_a_list(path[-1], node.value, place)
        return f"expected {describe(place.annotation)}, got {got(node.value)}{_cure(node.value, place.annotation)}"
    if place is not None and any(_LIMIT.search(detail["type"]) for detail in details):
        expected = " and ".join(limits(place.annotation)) or describe(place.annotation)
        expected = "a finite number" if any(detail["type"] == "finite_number" for detail in details) else expected
        return f"expected {expected}, got {got(node.value)}"
    return str(details[0]["msg"])


def _not_a_list(key: str, text: str, place: Place) -> str:
    """Return the message about a text in the place of a list. Of a list of components the usual ones are kept."""
    expected, names = describe(place.annotation), choices(place.annotation)
    wrong = [item for item in text.split(",") if names and item.strip() not in names]
    if wrong:
        return f"expected {expected}, got {got(text)}.{did_you_mean(wrong[0], names)}"
    usual = place.default.children().values() if place.default and "each item a component" in expected else ()
    items = ",".join(dict.fromkeys([*filter(None, (item.kind for item in usual)), text]))
    return f"expected a list, got {got(text)}; write {key}=[{items}]"


def got(value: object) -> str:
    """Describe the value in the recipe."""
    if isinstance(value, dict | list):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    shown = _shown(value)
    if isinstance(value, str):
        return f"text {shown!r}" + (" in quotes" if _number(value) is not None else "")
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return shown.lower()
    return f"the number {shown}" if isinstance(value, int | float) else f"a {type(value).__name__}, {shown}"


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _cure(value: object, annotation: object) -> str:
    """Return the fix for a common mistake, or an empty string."""
    expected = describe(annotation)
    if isinstance(value, str):
        if expected.startswith("a path"):  # in YAML a text is one
            return f"; write Path({value!r})"
        number = _number(value)
        if ("a number" in expected and number is not None) or (
            "a whole number" in expected and isinstance(number, int)
        ):
            return "; remove the quotes"
        if "true or false" in expected and value.lower() in _BOOLEANS:
            meant = _BOOLEANS[value.lower()]
            return f"; write {meant} (only true and false are booleans)" if meant != value else "; remove the quotes"
        return did_you_mean(value, choices(annotation)).replace(" Did", ". Did")
    if isinstance(value, float) and value.is_integer() and "a whole number" in expected:
        return f"; write {int(value)}"
    return "; put it in quotes" if isinstance(value, bool | int | float) and "text" in expected else ""


def _number(text: str) -> float | None:
    value = plain_value(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
