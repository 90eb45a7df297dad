"""Settings before validation: a tree of plain values, each with its origin (file and line, or override)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]  # the keys that lead to a value: ("logging", "0", "project")
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Node:
    """One value: a mapping or list of nodes, or a scalar."""

    value: Any  # dict[str, Node] | list[Node] | str | int | float | bool | None
    where: str  # "quickstart.yaml:12", "override 3 (optimizer.lr=1)" or "default"
    emptied: bool = False  # an override has removed all names of this mapping, which later ones may add to

    @property
    def kind(self) -> str | None:
        """The name of the component: a bare name, or the ``type`` of a mapping."""
        if isinstance(self.value, dict) and "type" in self.value:
            return str(self.value["type"].value)
        return self.value if isinstance(self.value, str) else None

    def children(self) -> dict[str, "Node"]:
        """Return the node under each key of a mapping or each index of a list."""
        if isinstance(self.value, list):
            return {str(index): item for index, item in enumerate(self.value)}
        return self.value if isinstance(self.value, dict) else {}

    def find(self, path: Path) -> tuple["Node", Path]:
        """Return the node at ``path``, or its closest ancestor, and the rest of the path."""
        node = self
        for depth, key in enumerate(path):
            below = node.children().get(key)
            if below is None:
                return node, path[depth:]
            node = below
        return node, ()

    def plain(self) -> Any:
        """Return the values without origins."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return [item.plain() for item in self.value] if isinstance(self.value, list) else self.value

    def without(self, paths: Iterable[Path]) -> "Node":
        """Return the tree without the values at ``paths``."""
        children = dict(self.children())
        for key, *rest in paths:
            if rest and key in children:
                children[key] = children[key].without([tuple(rest)])
            else:
                children.pop(key, None)
        return Node(children, self.where)

    def leaves(self, path: Path = ()) -> Iterator[Path]:
        """Yield the path of every scalar, empty list and empty mapping."""
        for key, item in self.children().items():
            yield from item.leaves((*path, key))
        if not self.children():
            yield path


def from_plain(value: object, where: str = DEFAULT) -> Node:
    """Return a tree of JSON-like values with a common origin."""
    if isinstance(value, dict):
        return Node({str(key): from_plain(item, where) for key, item in value.items()}, where)
    return Node([from_plain(item, where) for item in value] if isinstance(value, list | tuple) else value, where)


def dotted(path: Path) -> str:
    return ".".join(path)
