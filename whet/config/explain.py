"""The text of ``whet show``: a recipe's YAML with the origin of each value, or a description of one key."""

import textwrap
from collections.abc import Mapping

from whet.config.base import Config
from whet.config.issues import ConfigIssue, RecipeError
from whet.config.loading import Loaded
from whet.config.schema import find_place
from whet.config.tree import Node, dotted, from_plain
from whet.config.validation import unknown_key
from whet.config.words import describe, limits
from whet.config.yaml_text import dump_yaml, parse_yaml

_COLUMN = 44  # column of the origin comments, unless a line is longer


def annotated_yaml(loaded: Loaded[Config], notes: Mapping[str, str] | None = None) -> str:
    """Return the resolved recipe as YAML with each leaf's origin and note as a comment. It loads to the same recipe."""
    notes = notes or {}
    text = dump_yaml(loaded.value)
    lines, tree = text.splitlines(), parse_yaml(text, "line", [])
    assert tree is not None
    for path in tree.leaves():
        number = int(tree.find(path)[0].where.removeprefix("line:")) - 1
        lines[number] = f"{lines[number]:<{_COLUMN}}  # {loaded.origins[dotted(path)]}"
        if note := notes.get(dotted(path)):
            lines[number] += f": {note}"
    return "\n".join(lines) + "\n"


def explain(loaded: Loaded[Config], key: str) -> str:
    """Return ``explained`` as text."""
    rows = explained(loaded, key)
    width = max(map(len, rows))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items()).split("\n")
    return "\n".join([key, *map(str.rstrip, lines), ""])


def explained(loaded: Loaded[Config], key: str) -> dict[str, str]:
    """Return type, limits, default, value, origin and documentation of a key, as far as it has them. Raises RecipeError
    if it is unknown."""
    root, tree = type(loaded.value), from_plain(loaded.value.model_dump(mode="json"))
    path = tuple(key.split("."))
    keys = {dotted(leaf[:depth]): leaf[:depth] for leaf in tree.leaves() for depth in range(1, len(leaf) + 1)}
    path = keys.get(key, path)  # a key may itself hold dots
    place = find_place(root, tree, path)
    if place is None:
        while path[:-1] and find_place(root, tree, path[:-1]) is None:
            path = path[:-1]
        raise RecipeError([ConfigIssue(dotted(path), "--explain", unknown_key(root, tree, path))])
    node = tree.find(path)[0]
    origins = {where for name, where in loaded.origins.items() if f"{name}.".startswith(f"{key}.")}
    required = place.field is not None and place.field.is_required()
    rows = {
        "type": describe(place.annotation),
        "must be": " and ".join(limits(place.annotation)),
        "default": _inline(place.default) if place.default else "none (required)" if required else "none",
        "value": _inline(node),
        "from": ", ".join(sorted(origins)) or "default",
        "about": place.about,
    }
    for model in place.models(node):
        summary = (model.__doc__ or "").strip().partition("\n\n")[0]
        rows[model.__name__] = " ".join(summary.split()) or f"settings: {', '.join(model.model_fields)}"
    return {name: text for name, text in rows.items() if text}


def _inline(node: Node) -> str:
    text = dump_yaml({"value": node.plain()})
    first, _, more = text.partition("\n")
    return (
        "\n" + textwrap.indent(text.removeprefix("value:").strip("\n"), " " * 4)
        if more
        else first.removeprefix("value: ")
    )
