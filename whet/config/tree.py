"""Settings before they are checked: a tree of plain values, each knowing the file and line or override it came from.

Layers (a parent recipe, its child, the overrides) are merged here. The tree knows no types.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]  # where a value stands: ("logging", 0, "project")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written."""

    source: str  # a file as shown to people, "override" or "default"
    line: int | None = None  # counted from 1
    override: str | None = None  # "override 3 (optimizer.lr=1)"

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source

    @property
    def where(self) -> str:
        return self.override or str(self)


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Node:
    """One value: a mapping or list of nodes, or a scalar."""

    value: Any  # dict[str, Node] | list[Node] | str | int | float | bool | None
    origin: Origin
    quoted: bool = False  # a text that was written in quotes


def from_plain(value: Any, origin: Origin) -> Node:
    """A tree of JSON-like values that all came from one place."""
    if isinstance(value, dict):
        return Node({str(key): from_plain(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([from_plain(item, origin) for item in value], origin)
    return Node(value, origin)


def to_plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: to_plain(item) for key, item in node.value.items()}
    return [to_plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def merge(below: Node | None, above: Node, refuse: Callable[[Node, str], None]) -> Node:
    """``above`` laid over ``below``. Mappings merge key by key, everything else replaces.

    A mapping with another ``type`` replaces the whole, because the keys below belong to another class. A mapping over
    a bare name changes that component's keys. Keys 0, 1, ... over a list change its items. ``refuse(node, message)``
    is called for what can't be laid.
    """
    if below is None or not isinstance(above.value, dict):
        return above
    if isinstance(below.value, str) and below.value:
        below = Node({"type": below}, below.origin)
    if isinstance(below.value, list) and above.value and all(key.isdecimal() for key in above.value):
        items = list(below.value)
        for key, item in above.value.items():
            if int(key) < len(items):
                items[int(key)] = merge(items[int(key)], item, refuse)
            else:
                refuse(item, f"there is no item {key}: the list has {len(items)}, counted from 0")
        return Node(items, below.origin)
    if not isinstance(below.value, dict) or _type_changes(below.value, above.value):
        return above
    merged = dict(below.value)
    for key, item in above.value.items():
        merged[key] = merge(merged.get(key), item, refuse)
    return Node(merged, below.origin)


def _type_changes(below: dict[str, Node], above: dict[str, Node]) -> bool:
    return "type" in below and "type" in above and below["type"].value != above["type"].value


def nearest_node(root: Node, path: Path) -> tuple[Node, Path]:
    """The node at ``path`` or else its closest ancestor, and what of the path was left."""
    node = root
    for depth, key in enumerate(path):
        if isinstance(node.value, dict) and key in node.value:
            node = node.value[str(key)]
        elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
        else:
            return node, path[depth:]
    return node, ()


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every scalar, empty list and empty mapping of plain data."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)
