"""Walks settings and ``Config`` classes side by side: which class and field rule each key.

Fills in the defaults under a mapping that changes only some keys, turns YAML's lists and texts into the tuples, paths
and enums that strict fields want, and describes types in words. It checks nothing: pydantic does.
"""

import collections.abc
import enum
import pathlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from whet.config.component import Component, ComponentError
from whet.config.tree import DEFAULT, Node, from_plain, merge

_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Set, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclass(frozen=True, slots=True)
class Place:
    """What rules one value: its type, and the field that declares it unless it is an item of a list or mapping."""

    annotation: Any
    metadata: tuple[Any, ...] = ()
    field: FieldInfo | None = None
    owner: type[BaseModel] | None = None
    name: str = ""

    def alternatives(self) -> Iterator[tuple[Any, Component | None]]:
        """The members of a union, each with its component marker; a single type is a union of one."""
        metadata, annotation = self.metadata, self.annotation
        while get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            metadata = (*metadata, *more)
        marker = next((item for item in metadata if isinstance(item, Component)), None)
        if marker is None and get_origin(annotation) in (Union, types.UnionType):
            for member in get_args(annotation):
                yield from Place(member).alternatives()
        else:
            yield annotation, marker

    def models(self, node: Node | None) -> list[type[BaseModel]]:
        """The classes whose fields are the keys of ``node``. A component's class is the one that ``node`` names."""
        found: list[type[BaseModel]] = []
        for annotation, marker in self.alternatives():
            if marker is not None:
                name = node.value if node else None
                if isinstance(name, dict):
                    name = name["type"].value if "type" in name else None
                try:
                    found += [marker.resolve(name)] if isinstance(name, str) else []
                except ComponentError:
                    continue
            elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
                found.append(annotation)
        return found

    def children(self, node: Node | None, key: str | int) -> list["Place"]:
        """What may rule the value under ``key``; empty when the key is unknown."""
        found = []
        for model in self.models(node):
            if (field := model.model_fields.get(str(key))) is not None:
                found.append(Place(field.annotation, tuple(field.metadata), field, model, str(key)))
        for annotation, marker in self.alternatives():
            origin, args = get_origin(annotation) or annotation, get_args(annotation)
            if marker is not None or not args:
                continue
            if origin in _MAPPINGS and isinstance(key, str):
                found.append(Place(args[1]))
            elif origin is tuple and isinstance(key, int) and args[-1] is not Ellipsis:
                found += [Place(args[key])] if key < len(args) else []
            elif origin in _LISTS and isinstance(key, int):
                found.append(Place(args[0]))
        return found

    def known_keys(self, node: Node | None) -> list[str]:
        marked = any(marker for _, marker in self.alternatives())
        return ["type"] * marked + list(dict.fromkeys(name for m in self.models(node) for name in m.model_fields))


def default_tree(place: Place) -> Node | None:
    """The default of a field as a tree, or None when it has none that can be written down."""
    if place.field is None or place.field.is_required() or place.field.default_factory_takes_validated_data:
        return None
    value = place.field.get_default(call_default_factory=True)
    marker = next((marker for _, marker in place.alternatives() if marker), None)
    if isinstance(value, BaseModel):
        value = marker.as_mapping(value) if marker else value.model_dump(mode="json")
    elif isinstance(value, list | tuple) and place.owner is not None:
        written = place.owner.model_construct(None, **{place.name: value})
        value = written.model_dump(mode="json", include={place.name}, warnings=False)[place.name]
    return from_plain(value, DEFAULT)


def complete(place: Place, node: Node, refuse: Callable[[Node, str], None]) -> Node:
    """The tree with defaults under every mapping that names only some keys of a nested setting.

    With the default ``optimizer = AdamW(lr=1e-6)``, the recipe ``optimizer: {beta1: 0.8}`` keeps that learning rate,
    and a component whose ``type`` isn't named is the default one.
    """
    if isinstance(node.value, list):
        items = [_complete_child(place, node, index, item, refuse) for index, item in enumerate(node.value)]
        return Node(items, node.origin)
    if isinstance(node.value, dict):
        children = {key: _complete_child(place, node, key, item, refuse) for key, item in node.value.items()}
        return Node(children, node.origin)
    return node


def _complete_child(above: Place, node: Node, key: str | int, item: Node, refuse: Callable[[Node, str], None]) -> Node:
    for place in above.children(node, key):
        if isinstance(item.value, dict) and (default := default_tree(place)) is not None:
            merged = merge(default, item, refuse)
            item = Node(merged.value, item.origin)
        item = complete(place, item, refuse)
    return item


def to_values(place: Place, node: Node) -> Any:
    """Plain values with a tuple, set, ``Path`` or enum member wherever the field wants one and YAML can't write it."""
    value = node.value
    types_here = [annotation for annotation, marker in place.alternatives() if marker is None]
    origins = [get_origin(annotation) or annotation for annotation in types_here]
    if isinstance(value, dict):
        return {key: to_values(_first(place.children(node, key)), item) for key, item in value.items()}
    if isinstance(value, list):
        items = [to_values(_first(place.children(node, index)), item) for index, item in enumerate(value)]
        if list in origins or collections.abc.Sequence in origins:
            return items
        wanted = next((origin for origin in origins if origin in (tuple, set, frozenset)), None)
        return wanted(items) if wanted and (wanted is tuple or _all_scalars(items)) else items
    classes = [origin for origin in origins if isinstance(origin, type)]
    if isinstance(value, str) and str not in classes:
        for cls in classes:
            if issubclass(cls, enum.Enum) and value in {member.value for member in cls}:
                return cls(value)
        if any(issubclass(cls, pathlib.PurePath) for cls in classes) and value:
            return next(cls for cls in classes if issubclass(cls, pathlib.PurePath))(value)
    return value


def _first(places: list[Place]) -> Place:
    return places[0] if places else Place(Any)


def _all_scalars(items: list[Any]) -> bool:
    return not any(isinstance(item, list | dict) for item in items)


def describe_type(place: Place) -> str:
    """The type in words: ``a whole number``, ``'mean' or 'sum'``, ``a list of texts``."""
    words = list(dict.fromkeys(_describe(annotation, marker) for annotation, marker in place.alternatives()))
    if "null" in words:
        words = [word for word in words if word != "null"] + ["null"]
    return " or ".join(words)


def _describe(annotation: Any, marker: Component | None) -> str:
    if marker is not None:
        names = ", ".join(marker.registry) or "none built in"
        return f"a component (type: {names}; or a dotted path)"
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    simple = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "anything",
    }
    if origin in simple:
        return simple[origin]
    if origin is Literal:
        return " or ".join("null" if value is None else repr(value) for value in args)
    if origin in _MAPPINGS:
        return f"a mapping whose values are {describe_type(Place(args[1]))}" if args else "a mapping"
    if origin in _LISTS:
        if origin is tuple and args and args[-1] is not Ellipsis:
            return f"a list of {len(args)}: {', '.join(describe_type(Place(arg)) for arg in args)}"
        return f"a list, each item {describe_type(Place(args[0]))}" if args else "a list"
    if isinstance(origin, type):
        if issubclass(origin, enum.Enum):
            return " or ".join(repr(member.value) for member in origin)
        if issubclass(origin, pathlib.PurePath):
            return "a path"
        if issubclass(origin, BaseModel):
            return f"a mapping ({', '.join(origin.model_fields)})"
        return origin.__name__
    return str(annotation)


def describe_constraints(place: Place) -> list[str]:
    """The limits in words: ``greater than 0``."""
    words = {
        "gt": "greater than {}",
        "ge": "at least {}",
        "lt": "less than {}",
        "le": "at most {}",
        "multiple_of": "a multiple of {}",
        "min_length": "at least {} long",
        "max_length": "at most {} long",
        "pattern": "matching {}",
    }
    found = []
    metadata = list(place.metadata)
    members = get_args(place.annotation) if get_origin(place.annotation) in (Union, types.UnionType) else ()
    for member in (place.annotation, *members):
        if get_origin(member) is Annotated:
            metadata += get_args(member)[1:]
    for item in metadata:
        for inner in [item, *(getattr(item, "metadata", None) or ())]:
            for name, phrase in words.items():
                limit = getattr(inner, name, None)
                if limit is not None and not callable(limit):
                    found.append(phrase.format(limit))
    return list(dict.fromkeys(found))
