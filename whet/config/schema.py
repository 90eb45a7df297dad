"""Maps keys of a settings tree to the class, field and default that declare them.

``merge`` merges one layer of settings over another, on top of the defaults of newly named classes. pydantic validates
the result.
"""

import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from whet.config.base import Config
from whet.config.component import Component, ComponentError
from whet.config.documented import documentation
from whet.config.issues import ConfigIssue
from whet.config.tree import DEFAULT, Node, from_plain


@dataclass(frozen=True, slots=True)
class Place:
    """The declaration of one value: its type, and its field unless it is an item of a list or mapping."""

    annotation: object
    default: Node | None = None
    field: FieldInfo | None = None
    model: type[Config] | None = None  # which declares the field
    name: str = ""  # of the field

    @property
    def about(self) -> str:
        """The documentation of the field, if it is one."""
        return documentation(self.model, self.name) if self.model else ""

    @property
    def is_component(self) -> bool:
        return any(isinstance(member, Component) for member in _members(self.annotation))

    @property
    def has_free_keys(self) -> bool:
        """Return whether the value is a mapping of any keys."""
        origins = [get_origin(member) for member in _members(self.annotation)]
        return any(isinstance(origin, type) and issubclass(origin, Mapping) for origin in origins)

    def models(self, node: Node) -> dict[type[Config], Node]:
        """Return the classes whose fields are the keys of ``node``, each with its defaults; for a component, the class
        that ``node`` names."""
        classes: dict[type[Config], Node] = {}
        for member in _members(self.annotation):
            preset = None
            if isinstance(member, Component) and node.kind is not None:
                with suppress(ComponentError):
                    member, preset = member.resolve(node.kind)
            if isinstance(member, type) and issubclass(member, Config):
                defaults = preset.model_dump(mode="json") if preset is not None else member.defaults()
                classes[member] = from_plain(defaults)
        return classes

    def child(self, node: Node, key: str) -> "Place | None":
        """Return the declaration of the value under ``key`` of ``node``, or None for an unknown key."""
        default = self.default if self.default and _same_class(self.default, node) else None
        for model, defaults in self.models(node).items():
            if (field := model.model_fields.get(key)) is not None:
                kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
                usual = defaults.children() | (default.children() if default else {})
                return Place(kind, usual.get(key), field, model, key)
        if key == "type" and self.is_component:
            named = Node(self.default.kind, DEFAULT) if self.default else None
            return replace(self, default=named)
        for member in _members(self.annotation):
            origin, args = get_origin(member), get_args(member)
            if isinstance(origin, type) and issubclass(origin, Mapping):
                return Place(args[1])
            if origin is tuple and args[-1] is not Ellipsis:
                return Place(args[int(key)]) if key.isdecimal() and int(key) < len(args) else None
            if isinstance(origin, type) and args and isinstance(node.value, list):
                return Place(args[0])
        return None

    def expand(self, node: Node) -> Node:
        """Return the mapping that a plain string or number abbreviates, if the class has a ``bare`` field."""
        if isinstance(node.value, str | int | float) and not isinstance(node.value, bool):
            for model in self.models(node):
                if model.bare is not None:
                    return Node({model.bare: node}, node.where)
        return node

    def alternatives_with(self, key: str) -> list[str]:
        """Return the names of the component's types that have a setting ``key``."""
        components = (member for member in _members(self.annotation) if isinstance(member, Component))
        return [name for component in components for name in component.alternatives_with(key)]

    def known_keys(self, node: Node) -> list[str]:
        return ["type"] * self.is_component + [name for model in self.models(node) for name in model.model_fields]


UNTYPED = Place(Any)
EMPTY = from_plain({})


def find_place(root: type[Config], tree: Node, path: tuple[str, ...]) -> Place | None:
    """Return the declaration of the value at ``path``, or None if a key is unknown."""
    place: Place | None = Place(root)
    for depth, key in enumerate(path):
        around, rest = tree.find(path[:depth])
        place = place.child(EMPTY if rest else around, key) if place else None
    return place


def merge(place: Place, below: Node | None, above: Node, issues: list[ConfigIssue]) -> Node:
    """Return ``above`` merged over ``below``. Mappings merge key by key, everything else replaces; so does an empty
    mapping of free keys, which would change nothing.

    A new mapping is merged over the default: with ``optimizer = AdamW(lr=1e-6)`` by default, the recipe
    ``optimizer: {beta1: 0.8}`` keeps that learning rate, and a component without ``type`` is the default one. A mapping
    with another ``type`` replaces the whole, because the keys below belong to another class. Keys 0, 1, ... over a list
    change its items.
    """
    above = place.expand(above)

    def child(around: Node, key: str, old: Node | None, item: Node) -> Node:
        return merge(place.child(around, key) or UNTYPED, old, item, issues)

    if isinstance(above.value, list):
        return Node([child(above, str(index), None, item) for index, item in enumerate(above.value)], above.where)
    if not isinstance(above.value, dict) or (not above.value and place.has_free_keys):
        return above
    lower = () if above.emptied else (below, place.default, *place.models(above).values())
    under = next((node for node in lower if node and _same_class(node, above)), EMPTY)
    where = above.where if under.where == DEFAULT else under.where
    items = dict(under.children())
    if isinstance(under.value, list):
        for key, item in above.value.items():
            if key in items:
                items[key] = child(under, key, items[key], item)
            else:
                message = (
                    f"there is no item {key}: the list has {len(items)} item{'s' * (len(items) != 1)}, counted from 0"
                )
                issues.append(ConfigIssue("", item.where, message))
        return Node(list(items.values()), where)
    if isinstance(under.value, str):
        items = {"type": under}
    merged = Node({**items, **above.value}, where)  # its ``type`` names the class
    items |= {key: child(merged, key, items.get(key), item) for key, item in above.value.items()}
    return Node(items, where, above.emptied or under.emptied)


def _same_class(below: Node, above: Node) -> bool:
    """Return whether ``above`` changes parts of ``below`` instead of replacing it."""
    if isinstance(below.value, list):
        return bool(above.value) and isinstance(above.value, dict) and all(key.isdecimal() for key in above.value)
    return isinstance(below.value, dict | str) and above.kind in (None, below.kind or above.kind)


def _members(annotation: object) -> list[object]:
    """Return the members of a union; a member marked as a component is represented by its marker."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return [item for item in metadata if isinstance(item, Component)] or _members(inner)
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for alternative in get_args(annotation) for member in _members(alternative)]
    return [annotation]
