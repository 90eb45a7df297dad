"""Tests that call the functions of a program in another process. Only plain values come back: what compares them can't
be reached from there, and no object of the program's has a say in whether it equals what is expected.

Lines of JSON on a socket; tuples, sets and so on are marked, ``{"tuple": [1, 2]}``. An object that has no plain value
stays where it is; the tests get a number for it, by which they may call it, read it and hand it back.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

_MOST = 100_000  # values of an iterator that are looked at
_TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}
_CONTAINERS: dict[str, type[Collection[Any]]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


class ProgramError(Exception):
    """The program raised, or is gone."""


def load_program(source: str, name: str) -> ModuleType:
    """Run a program as the module of that name."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module


def answer_calls(load: Callable[[], ModuleType], link: int) -> None:
    """The program's side: do what the tests ask."""
    module, kept = load(), list[Any]()

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    with open(link, closefd=False) as questions:
        for line in questions:
            verb, *arguments = _decode(json.loads(line), lambda number: kept[number])
            try:
                value = _VERBS[verb](*arguments) if verb != "name" else _named(module, *arguments)
                reply = {"value": _encode(value, keep)}
            except BaseException as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:500]}
            os.write(link, json.dumps(reply).encode() + b"\n")


_VERBS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
}


def _named(module: ModuleType, name: str) -> Any:
    """What a program calls so, or a method of its class ``Solution``."""
    if not hasattr(module, name) and hasattr(module, "Solution"):
        return getattr(module.Solution(), name)
    return getattr(module, name)


class Remote:
    """An object of the program's, as the tests see it."""

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        self.__dict__.update(_ask=ask, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)


def run_tests(link: int, file: int) -> None:
    """The tests' side: run ``file``, JSON of their ``source`` and of the ``names`` that the program's functions have
    there. Raises ``AssertionError``, or whatever they raise."""
    tests = json.loads(os.pread(file, os.fstat(file).st_size, 0))
    replies = os.fdopen(link, closefd=False)

    def ask(*question: Any) -> Any:
        os.write(link, json.dumps(_encode(question, lambda one: one.__dict__["_number"])).encode() + b"\n")
        reply = json.loads(replies.readline() or '{"error": "it ended"}')
        if "error" in reply:
            raise ProgramError(reply["error"])
        return _decode(reply["value"], lambda number: Remote(ask, number))

    names = {here: ask("name", there) for here, there in tests["names"].items()}
    exec(compile(tests["source"], "tests.py", "exec"), {"__name__": "tests", **names})


def _encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return JSON for a value; what has no plain value is kept."""
    if value is None or isinstance(value, str | int | float):
        return value
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [_encode(one, keep) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, keep), _encode(one, keep)] for key, one in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": list(value)}
    if isinstance(value, type) and any(value is one for one in _TYPES.values()):
        return {"type": value.__name__}
    if isinstance(value, Iterator):
        return {"iterator": [_encode(one, keep) for one in itertools.islice(value, _MOST)]}
    return {"object": keep(value)}


def _decode(value: Any, find: Callable[[int], Any]) -> Any:
    """Return the value, of built-in types alone."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "object":
        return find(inner)
    if kind == "type":
        return _TYPES[inner]
    if kind == "dict":
        return {_decode(key, find): _decode(one, find) for key, one in inner}
    if kind == "complex":
        return complex(*inner)
    if kind == "bytes":
        return bytes(inner)
    items = [_decode(one, find) for one in inner]
    return iter(items) if kind == "iterator" else _CONTAINERS[kind](items)  # type: ignore[call-arg]
