"""Shows a loaded recipe to people: its YAML with the origin of each value, and everything known about one key."""

from whet.config.base import Config
from whet.config.component import Component
from whet.config.docs import field_docs
from whet.config.loading import Loaded
from whet.config.problems import Problem, RecipeError
from whet.config.schema import default_tree, describe_constraints, describe_type
from whet.config.tree import Node, Origin, Path, dotted, from_plain, nearest_node, to_plain
from whet.config.validation import place_of, unknown_key
from whet.config.yaml_text import dump_yaml, parse_yaml

_COLUMN = 44  # where the origin comments start, unless a line is longer


def annotated_yaml(loaded: Loaded[Config]) -> str:
    """The resolved recipe as YAML with the origin of each leaf as a comment. It loads to the same recipe."""
    text = dump_yaml(loaded.value)
    tree = parse_yaml(text, Origin("dump"), [])
    lines = text.splitlines()
    for key, origin in loaded.origins.items():
        if tree is None:
            break
        node, _ = nearest_node(tree, _keys(key, tree))
        if node.origin.line is not None:
            line = lines[node.origin.line - 1]
            lines[node.origin.line - 1] = f"{line:<{_COLUMN}}  # {origin}"
    return "\n".join(lines) + "\n"


def explain(loaded: Loaded[Config], key: str) -> str:
    """The value, type, limits, default, documentation and origin of one key. Raises RecipeError for an unknown key."""
    tree = from_plain(loaded.value.model_dump(mode="json"), Origin("resolved"))
    path = _keys(key, tree)
    node, rest = nearest_node(tree, path)
    root = type(loaded.value)
    is_type = len(path) > 1 and path[-1] == "type" and not rest
    place, _ = place_of(root, tree, path[:-1] if is_type else path)
    if place is None:
        around, unknown = nearest_node(tree, path)
        while path and unknown[1:]:
            path, unknown = path[:-1], unknown[:-1]
        message = unknown_key(str(path[-1]), place_of(root, tree, path)[1].known_keys(around))
        raise RecipeError([Problem(dotted(path), "--explain", message)])
    rows = {"type": describe_type(place)}
    if constraints := describe_constraints(place):
        rows["must be"] = " and ".join(constraints)
    if not is_type:
        default = _default(type(loaded.value), tree, path)
        rows["default"] = _inline(default) if default else ("none: it must be given" if place.field else "none")
    rows["value"] = _inline(node)
    rows["from"] = _origin(loaded, key)
    if place.owner is not None and (about := field_docs(place.owner).get(place.name)):
        rows["about"] = about
    for model in place.models(node):
        summary = (model.__doc__ or "").strip().partition("\n\n")[0]
        rows[model.__name__] = " ".join(summary.split()) or f"settings: {', '.join(model.model_fields)}"
    for _, marker in place.alternatives():
        if isinstance(marker, Component):
            rows["known types"] = ", ".join(marker.registry)
    width = max(map(len, rows))
    return f"{key}\n" + "".join(f"  {name:<{width}}  {text}\n" for name, text in rows.items())


def _default(root: type[Config], tree: Node, path: Path) -> Node | None:
    """What the key is when the recipe doesn't name it: a section's own default goes before those of its class."""
    default: Node | None = None
    for depth in range(len(path)):
        around, _ = nearest_node(tree, path[:depth])
        written = default.value if default is not None else {}
        known = dict(enumerate(written)) if isinstance(written, list) else written if isinstance(written, dict) else {}
        kind = around.value.get("type") if isinstance(around.value, dict) else None
        same_class = "type" not in known or kind is None or known["type"].value == kind.value
        place, _ = place_of(root, tree, path[: depth + 1])
        if same_class and path[depth] in known:
            default = known[path[depth]]
        else:
            default = default_tree(place) if place is not None else None
    return default


def _keys(key: str, tree: Node) -> Path:
    """A dotted key as a path, where a number behind a list is an index and a key may itself hold dots."""
    path: list[str | int] = []
    parts = key.split(".")
    while parts:
        node, rest = nearest_node(tree, tuple(path))
        if isinstance(node.value, list) and parts[0].isdecimal():
            path.append(int(parts.pop(0)))
            continue
        size = 1
        if isinstance(node.value, dict) and not rest:
            size = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in node.value), 1)
        path.append(".".join(parts[:size]))
        del parts[:size]
    return tuple(path)


def _origin(loaded: Loaded[Config], key: str) -> str:
    under = {origin for name, origin in loaded.origins.items() if name == key or name.startswith(f"{key}.")}
    return ", ".join(sorted(under)) or "default"


def _inline(node: Node) -> str:
    text = dump_yaml({"value": to_plain(node)})
    first, _, more = text.partition("\n")
    if not more:
        return first.removeprefix("value: ")
    return "\n" + "\n".join(f"      {line}" for line in text.removeprefix("value:").strip("\n").splitlines())
