"""Values as JSON between two processes of which one may lie: what comes out is of built-in types and of those of the
standard library alone, and nothing that comes in is run.

Numbers, texts, booleans and None stand for themselves; all else is a node ``[kind, content]`` in a list of nodes, and
``[7]`` refers to the seventh, so that values may share parts, contain themselves and be as deep as they like.
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
"""Makes the node of a value that is of no such type. What ``made`` nodes hold may be of any."""
Find = Callable[[str, Any], Any]
"""Finds the value of such a node; of ``made`` ones, an object that is still empty."""

_MOST = 100_000  # values of an iterator that are looked at
_SMALL = 1 << 63
_TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_MUTABLE: dict[str, Callable[[], Any]] = {
    "list": list, "set": set, "deque": deque, "bytearray": bytearray, "dict": dict, "Counter": Counter,
    "OrderedDict": OrderedDict, "defaultdict": defaultdict,
}  # fmt: skip
_VIEWS = {"dict_keys": type({}.keys()), "dict_values": type({}.values()), "dict_items": type({}.items())}
_PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda given: complex(*given)),
    "Decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (timedelta, lambda one: [one.days, one.seconds, one.microseconds], lambda given: timedelta(*given)),
}


class Packer:
    """Makes nodes of values."""

    def __init__(self, special: Special, known: Sequence[Any] = ()) -> None:
        """``known``: objects that become the first nodes."""
        self._special = special
        self.nodes: list[Any] = []
        self.objects: list[Any] = []  # of each node; kept alive, so that no other gets its identity
        self._places: dict[int, int] = {}
        for one in known:
            self._place(one)

    def pack(self, value: Any) -> Any:
        """Return what stands for the value, after making the nodes that it needs."""
        reference = self._reference(value)
        while len(self.nodes) < len(self.objects):
            self.nodes.append([*self._node(self.objects[len(self.nodes)])])
        return reference

    def _reference(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str | float):
            return value
        if isinstance(value, int) and -_SMALL < value < _SMALL:
            return int(value)
        place = self._places.get(id(value))
        return [self._place(value) if place is None else place]

    def _place(self, value: Any) -> int:
        self._places[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1

    def _all(self, values: Any) -> list[Any]:
        return [self._reference(one) for one in values]

    def _pairs(self, values: dict[Any, Any]) -> list[Any]:
        return [[self._reference(key), self._reference(value)] for key, value in values.items()]

    def _node(self, value: Any) -> Node:
        if isinstance(value, int):
            return "int", hex(value)
        if isinstance(value, defaultdict):
            return "defaultdict", [_NAMES.get(value.default_factory), self._pairs(value)]  # type: ignore[arg-type]
        if isinstance(value, dict):
            name = next(one.__name__ for one in (Counter, OrderedDict, dict) if isinstance(value, one))
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
        for name, (plain, tell, _) in _PLAIN.items():
            if isinstance(value, plain):
                return name, tell(value)
        if isinstance(value, type) and value in _NAMES:
            return "type", _NAMES[value]
        if isinstance(value, Iterator) and type(value).__module__ in sys.stdlib_module_names:
            return "iterator", self._all(islice(value, _MOST))
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return "same", self._reference(value.tolist())
        kind, content = self._special(value)
        return kind, [content[0], self._pairs(content[1])] if kind == "made" else content


class Unpacker:
    """Makes values of nodes. Raises whatever errors there are in nodes that nobody honest made."""

    def __init__(self, nodes: Sequence[Any], find: Find, into: Sequence[Any] = ()) -> None:
        """``into``: objects that the first nodes are the new contents of; only lists and the like take them."""
        self._nodes, self._find = nodes, find
        self.objects: dict[int, Any] = dict(enumerate(into))
        fill = list[int]()
        for place, (kind, content) in enumerate(nodes):
            if kind == "made":
                self.objects.setdefault(place, find(kind, content))
                fill.insert(0, place)  # others may be found by what these contain
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
        return [self.get(one) for one in references]

    def _fill(self, value: Any, kind: str, content: Any) -> None:
        if kind == "made":
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

    def _build(self, kind: str, content: Any) -> Any:
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
