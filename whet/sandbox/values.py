"""Values as JSON between two processes, one of which is untrusted: unpacked values only have types of Python and its
standard library, and unpacking runs no code of the sender.

Numbers, texts, booleans and None represent themselves; any other value is a node ``[kind, content]`` in a list of
nodes, and ``[7]`` refers to node 7, so values may share parts, contain themselves and be of any depth.
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

Node = tuple[str, Any] | list[Any]
Special = Callable[[Any], Node]
"""Returns the node of a value of any other type. An ``instance`` node may contain values of any type."""
Find = Callable[[str, Any], Any]
"""Returns the value of such a node; for ``instance``, an object without attributes."""

_MAX_ITEMS = 100_000  # of an iterator
_SMALL_INT = 1 << 63
_TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_MUTABLE: dict[str, Callable[[], Any]] = {
    "list": list, "set": set, "deque": deque, "bytearray": bytearray, "dict": dict, "Counter": Counter,
    "OrderedDict": OrderedDict, "defaultdict": defaultdict,
}  # fmt: skip
_VIEWS = {"dict_keys": type({}.keys()), "dict_values": type({}.values()), "dict_items": type({}.items())}
_PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
    ),
}


class Packer:
    """Converts values to nodes."""

    def __init__(self, special: Special, first: Sequence[Any] = ()) -> None:
        """``first``: objects that become the first nodes."""
        self._special = special
        self.nodes: list[Any] = []
        self.objects: list[Any] = []  # of each node; kept alive, so that their ids stay unique
        self._places: dict[int, int] = {}
        for value in first:
            self._place(value)

    def pack(self, value: object) -> object:
        """Return the value or a reference to its node, after creating the nodes that it needs."""
        reference = self._reference(value)
        while len(self.nodes) < len(self.objects):
            self.nodes.append([*self._node(self.objects[len(self.nodes)])])
        return reference

    def _reference(self, value: object) -> object:
        if value is None or isinstance(value, bool | str | float):
            return value
        if isinstance(value, int) and -_SMALL_INT < value < _SMALL_INT:
            return int(value)
        place = self._places.get(id(value))
        return [self._place(value) if place is None else place]

    def _place(self, value: object) -> int:
        self._places[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1

    def _all(self, values: Any) -> list[object]:
        return [self._reference(value) for value in values]

    def _pairs(self, values: dict[object, object]) -> list[object]:
        return [[self._reference(key), self._reference(value)] for key, value in values.items()]

    def _node(self, value: object) -> Node:
        if isinstance(value, int):
            return "int", hex(value)
        if isinstance(value, defaultdict):
            return "defaultdict", [_NAMES.get(value.default_factory), self._pairs(value)]  # type: ignore[arg-type]
        if isinstance(value, dict):
            name = next(kind.__name__ for kind in (Counter, OrderedDict, dict) if isinstance(value, kind))
            return name, self._pairs(value)
        if isinstance(value, bytearray):
            return "bytearray", value.hex()
        for container in (list, set, deque, frozenset):
            if isinstance(value, container):
                return container.__name__, self._all(value)
        if isinstance(value, tuple):
            if fields := getattr(value, "_fields", None):
                return "namedtuple", [type(value).__name__, list(fields), self._all(value)]
            return "tuple", self._all(value)
        for name, view in _VIEWS.items():
            if isinstance(value, view):
                return name, self._all(value)
        if isinstance(value, range):
            return "range", self._all((value.start, value.stop, value.step))
        if isinstance(value, Fraction):
            return "Fraction", self._all((value.numerator, value.denominator))
        for name, (plain, encode, _) in _PLAIN.items():
            if isinstance(value, plain):
                return name, encode(value)
        if isinstance(value, type) and value in _NAMES:
            return "type", _NAMES[value]
        if isinstance(value, Iterator) and type(value).__module__ in sys.stdlib_module_names:
            return "iterator", self._all(islice(value, _MAX_ITEMS))
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return "same", self._reference(value.tolist())
        kind, content = self._special(value)
        return kind, [content[0], self._pairs(content[1])] if kind == "instance" else content


class Unpacker:
    """Converts nodes to values. Invalid nodes, from a malicious sender, raise errors of any class."""

    def __init__(self, nodes: Sequence[Any], find: Find, targets: Sequence[Any] = ()) -> None:
        """``targets``: objects whose contents are replaced by the first nodes, if they are mutable."""
        self._nodes, self._find = nodes, find
        self.objects: dict[int, Any] = dict(enumerate(targets))
        fill = list[int]()
        for place, (kind, content) in enumerate(nodes):
            if kind == "instance":
                self.objects.setdefault(place, find(kind, content))
                fill.insert(0, place)  # instances first, because hashes of other values may depend on their attributes
            elif kind in _MUTABLE:
                self.objects.setdefault(place, _MUTABLE[kind]())
                fill.append(place)
        for place in fill:
            self._fill(self.objects[place], *nodes[place])

    def get(self, reference: Any) -> Any:
        if not isinstance(reference, list):
            return reference
        (place,) = reference
        if place not in self.objects:
            self.objects[place] = self._build(*self._nodes[place])
        return self.objects[place]

    def _all(self, references: Any) -> list[Any]:
        return [self.get(reference) for reference in references]

    def _fill(self, value: Any, kind: str, content: Any) -> None:
        if kind == "instance":
            for name, reference in content[1]:
                if not name.startswith("__") and not callable(getattr(type(value), name, None)):
                    object.__setattr__(value, name, self.get(reference))
        elif kind == "bytearray":
            value[:] = bytes.fromhex(content)
        elif kind == "list":
            value[:] = self._all(content)
        elif kind in ("set", "deque"):
            items = self._all(content)
            value.clear()
            (value.update if kind == "set" else value.extend)(items)
        else:
            if kind == "defaultdict":
                value.default_factory, content = _TYPES.get(content[0]), content[1]
            pairs = [self._all(pair) for pair in content]
            value.clear()
            for key, item in pairs:
                value[key] = item

    def _build(self, kind: str, content: Any) -> object:
        if kind == "int":
            return int(content, 16)
        if kind in ("tuple", "frozenset"):
            return (tuple if kind == "tuple" else frozenset)(self._all(content))
        if kind == "namedtuple":
            name, fields, items = content
            return namedtuple(name, fields)(*self._all(items))
        if kind in _VIEWS:
            items = self._all(content)
            if kind == "dict_values":
                return dict(enumerate(items)).values()
            return dict.fromkeys(items).keys() if kind == "dict_keys" else dict(items).items()
        if kind == "range":
            return range(*self._all(content))
        if kind == "Fraction":
            return Fraction(*self._all(content))
        if kind in _PLAIN:
            return _PLAIN[kind][2](content)
        if kind == "type":
            return _TYPES[content]
        if kind == "iterator":
            return iter(self._all(content))
        if kind == "same":
            return self.get(content)
        return self._find(kind, content)
