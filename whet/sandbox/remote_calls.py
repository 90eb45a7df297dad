"""Tests that call the functions of a program in another process. Only plain values are returned (``values``): the
program can't reach the comparisons, and none of its objects decides whether it equals an expected value.

The protocol is lines of JSON on a socket. Each side may send a request; the other side replies with a value or an
error, or sends a request in between: tests call functions of the program, and the program calls functions that the
tests passed to it. An object that is not plain data stays in its process; the other side gets a number for it. Objects
of classes that both sides define, such as the nodes of a list, are copied.
"""

import ast
import builtins
import importlib
import importlib.util
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, NoReturn

from whet.sandbox import numpy_part
from whet.sandbox.remote_objects import VERBS, Remote
from whet.sandbox.values import Node, Packer, Unpacker

_ENDS_A_LOOP = ("StopIteration", "StopAsyncIteration")  # and so tests that have compared nothing yet
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and name not in _ENDS_A_LOOP
}


class ProgramError(Exception):
    """The program raised an error whose class the tests don't have."""


def load_program(file: int, name: str) -> ModuleType:
    """Run the program in an open ``file`` as the module ``name``; return the module."""
    source = _read(file).decode("utf-8", "surrogatepass")
    os.close(file)
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = "program.py"
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module


def answer_calls(load: Callable[[], ModuleType], link: int) -> None:
    """Serve the requests of the tests, in the program's process."""
    _Program(link, load()).serve()


def run_tests(link: int, file: int) -> None:
    """Run the tests in ``file``, a ``Checks`` as JSON, in their process. Raises their ``AssertionError`` or other
    error."""
    checks = json.loads(_read(file))
    sys.set_int_max_str_digits(0)
    if "numpy" in checks["source"] and importlib.util.find_spec("numpy") is None:
        sys.modules["numpy"] = numpy_part
    tests = _Tests(link, checks["source"])
    for name, program_name in checks["names"].items():
        tests.module.__dict__[name] = tests.ask("name", program_name)
    exec(compile(checks["source"], "tests.py", "exec"), tests.module.__dict__)


class _Endpoint(ABC):
    """One side of the connection."""

    def __init__(self, link: int, module: ModuleType) -> None:
        self._link, self._lines = link, open(link, "rb", closefd=False)  # noqa: SIM115
        self.module, self._kept = module, list[Any]()

    def ask(self, verb: str, *arguments: object) -> object:
        """Return the other side's reply, or raise its error."""
        packer = Packer(self._special)
        reference = packer.pack(arguments)
        self._send({"ask": verb, "nodes": packer.nodes, "value": reference})
        while "ask" in (reply := self._receive()):
            self._send(self._answer(reply))
        return self._result(reply, packer)

    def _send(self, message: dict[str, object]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self._link, data) :]

    def _receive(self) -> dict[str, object]:
        message: dict[str, Any] = json.loads(self._lines.readline())
        return message

    def _result(self, reply: dict[str, Any], packer: Packer) -> object:
        if "error" in reply:
            raise ProgramError(reply["error"])
        return Unpacker(reply["nodes"], self._find).get(reply["value"])

    @abstractmethod
    def _answer(self, request: dict[str, object]) -> dict[str, object]:
        """Return the reply to a request of the other side."""

    @abstractmethod
    def _special(self, value: object) -> Node:
        """Return the node for a value that is not plain data."""

    @abstractmethod
    def _find(self, kind: str, content: object) -> object:
        """Return the object of a node that is not plain data."""

    def _keep(self, value: object) -> int:
        self._kept.append(value)
        return len(self._kept) - 1

    def _empty_instance(self, name: str) -> object:
        """Return an instance of the class ``name``, without attributes."""
        kind = getattr(self.module, name, None)
        if not isinstance(kind, type) or kind.__module__ != self.module.__name__:
            raise ProgramError(f"there is no class {name!r}")
        return object.__new__(kind)


class _Callback:
    """A function of the tests, in the program's process."""

    def __init__(self, end: _Endpoint, number: int) -> None:
        self._end, self.number = end, number

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._end.ask("call", self, arguments, named)


class _Program(_Endpoint):
    def __init__(self, link: int, module: ModuleType) -> None:
        super().__init__(link, module)
        self._shared: list[str] = []

    def serve(self) -> None:
        while line := self._lines.readline():
            self._send(self._answer(json.loads(line)))

    def _answer(self, request: dict[str, Any]) -> dict[str, object]:
        nodes, packer = request["nodes"], Packer(self._special)
        try:
            unpacker = Unpacker(nodes, self._find)
            value = self._do(request["ask"], *unpacker.get(request["value"]))
            reply = {"value": packer.pack(value), "nodes": packer.nodes}
            if value is None:  # then the function may have changed its arguments
                after = Packer(self._special, [unpacker.objects.get(place) for place in range(len(nodes))])
                after.pack(None)
                if after.nodes[: len(nodes)] != nodes:
                    reply["changed"] = after.nodes
            return reply
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            packer = Packer(self._special)
            try:
                return {"error": names, "value": packer.pack(list(error.args)), "nodes": packer.nodes}
            except BaseException:
                return {"error": names, "value": "", "nodes": []}

    def _do(self, verb: str, *arguments: Any) -> object:
        if verb == "share":
            self._shared = arguments[0]
            return None
        if verb == "name":
            module, name = self.module, arguments[0]
            if not hasattr(module, name) and hasattr(module, "Solution"):
                return getattr(module.Solution(), name)  # a method of the class that LeetCode uses
            return getattr(module, name)
        return VERBS[verb](*arguments)

    def _special(self, value: object) -> Node:
        if isinstance(value, _Callback):
            return "callback", value.number
        if isinstance(value, Coroutine):
            return "coroutine", self._keep(value)
        if isinstance(value, type) and issubclass(value, Exception):
            base = next(kind.__name__ for kind in value.__mro__ if kind.__name__ in _ERRORS)
            return "exception", [value.__name__, base]
        if type(value).__name__ in self._shared and not isinstance(value, type):
            return _instance_node(value)
        return "object", self._keep(value)

    def _find(self, kind: str, content: Any) -> object:
        if kind == "instance":
            return self._empty_instance(content[0])
        if kind == "callback":
            return _Callback(self, content)
        if kind == "named":
            return getattr(importlib.import_module(content[0]), content[1])
        return self._kept[content]


class _Tests(_Endpoint):
    def __init__(self, link: int, source: str) -> None:
        super().__init__(link, ModuleType("tests"))
        self._errors: dict[str, type[Exception]] = {}
        parsed = ast.walk(ast.parse(source))
        self.ask("share", [node.name for node in parsed if isinstance(node, ast.ClassDef)])

    def _receive(self) -> dict[str, object]:
        try:
            return super()._receive()
        except Exception as error:
            _abort(error)

    def _result(self, reply: dict[str, Any], packer: Packer) -> object:
        try:
            value = Unpacker(reply["nodes"], self._find).get(reply["value"])
            if "changed" in reply:
                nodes = reply["changed"]
                if any(new[0] != old[0] for new, old in zip(nodes, packer.nodes, strict=False)):
                    raise ProgramError("arguments can't change their type")
                Unpacker(nodes, self._find, packer.objects)
            names = reply.get("error")
        except Exception as error:
            _abort(error)
        if names is not None:
            raise self._error(names, value if isinstance(value, list) else [])
        return value

    def _error(self, names: list[str], arguments: list[object]) -> Exception:
        classes = {**_ERRORS, **self._errors}
        kind = next((classes[name] for name in names if name in classes), ProgramError)
        if kind is ProgramError or set(names) & set(_ENDS_A_LOOP):
            return ProgramError(names[0], *arguments)
        try:
            return kind(*arguments)
        except TypeError:
            return ProgramError(names[0], *arguments)

    def _answer(self, request: dict[str, Any]) -> dict[str, object]:
        try:
            function, arguments, named = Unpacker(request["nodes"], self._find).get(request["value"])
        except Exception as error:
            _abort(error)
        packer = Packer(self._special)
        try:
            return {"value": packer.pack(function(*arguments, **named)), "nodes": packer.nodes}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}

    def _special(self, value: object) -> Node:
        if isinstance(value, Remote):
            return "object", value.__dict__["_number"]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", ".")
        if module in sys.stdlib_module_names and "." not in name and callable(value):
            return "named", [module, name]
        if type(value).__module__ == "tests":
            return _instance_node(value)
        if callable(value):
            return "callback", self._keep(value)
        raise TypeError(f"tests can't pass a {type(value).__name__} to a program")

    def _find(self, kind: str, content: Any) -> object:
        if kind == "instance":
            return self._empty_instance(content[0])
        if kind == "callback":
            return self._kept[content]
        if kind == "coroutine":
            return self._awaited(content)
        if kind == "exception":
            name, base = content
            return self._errors.setdefault(name, type(name, (_ERRORS[base],), {}))
        if kind == "object":
            return Remote(self, content)
        raise ValueError(kind)

    async def _awaited(self, number: int) -> object:
        return self.ask("await", Remote(self, number))


def _abort(error: Exception) -> NoReturn:
    """End the tests as failed. Does not raise, because tests may catch errors."""
    print(f"the program ended, or sent an invalid reply ({type(error).__name__})", file=sys.stderr, flush=True)
    os._exit(1)


def _instance_node(value: object) -> Node:
    """Return the node of an object: the name of its class, and its attributes."""
    attributes = dict(getattr(value, "__dict__", {}))
    slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return "instance", [type(value).__name__, attributes]


def _read(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        return stream.read()
