"""Tests that call the functions of a program in another process. Only plain values come back (``values``): what
compares them can't be reached from there, and no object of the program's has a say in whether it equals what is
expected.

Lines of JSON on a socket. Each side may ask the other, which answers with a value or an error, or asks something in
between: tests call functions of the program, and the program functions that the tests handed to it. An object that has
no plain value stays where it is; the other side gets a number for it. Objects of classes that both sides have, such as
the nodes of a list, are copied.
"""

import ast
import builtins
import importlib
import importlib.util
import itertools
import json
import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, NoReturn

from whet.sandbox import numpy_part
from whet.sandbox.values import Node, Packer, Unpacker

_ENDS_A_LOOP = ("StopIteration", "StopAsyncIteration")  # and with it tests that have compared nothing yet
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and name not in _ENDS_A_LOOP
}
_TOLD = ("__name__", "__doc__")


class ProgramError(Exception):
    """The program raised what tests have no name for."""


def load_program(file: int, name: str) -> ModuleType:
    """Run the program in an open ``file`` as the module of that name."""
    source = _read(file).decode("utf-8", "surrogatepass")
    os.close(file)
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module


def answer_calls(load: Callable[[], ModuleType], link: int) -> None:
    """The program's side: do what the tests ask."""
    _Program(link, load()).serve()


def run_tests(link: int, file: int) -> None:
    """The tests' side: run ``file``, JSON of their ``source`` and of the ``names`` that the program's functions have
    there. Raises ``AssertionError``, or whatever they raise."""
    given = json.loads(_read(file))
    sys.set_int_max_str_digits(0)
    if "numpy" in given["source"] and importlib.util.find_spec("numpy") is None:
        sys.modules["numpy"] = numpy_part
    tests = _Tests(link, given["source"])
    for here, there in given["names"].items():
        tests.module.__dict__[here] = tests.ask("name", there)
    exec(compile(given["source"], "tests.py", "exec"), tests.module.__dict__)


class _End(ABC):
    """One end of the link."""

    def __init__(self, link: int, module: ModuleType) -> None:
        self._link, self._lines = link, open(link, "rb", closefd=False)  # noqa: SIM115
        self.module, self._kept = module, list[Any]()

    def ask(self, verb: str, *given: Any) -> Any:
        """Return what the other side answers. Raises the error that it had."""
        packer = Packer(self._special)
        reference = packer.pack(given)
        self._send({"ask": verb, "nodes": packer.nodes, "value": reference})
        while "ask" in (reply := self._receive()):
            self._send(self._answer(reply))
        return self._result(reply, packer)

    def _send(self, message: dict[str, Any]) -> None:
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            left = left[os.write(self._link, left) :]

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._lines.readline())
        return message

    def _result(self, reply: dict[str, Any], packer: Packer) -> Any:
        if "error" in reply:
            raise ProgramError(reply["error"])
        return Unpacker(reply["nodes"], self._find).get(reply["value"])

    @abstractmethod
    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a question of the other side."""

    @abstractmethod
    def _special(self, value: Any) -> Node:
        """Return the node of a value that is not plain data."""

    @abstractmethod
    def _find(self, kind: str, content: Any) -> Any:
        """Return the object that a node of a special kind stands for."""

    def _keep(self, value: Any) -> int:
        self._kept.append(value)
        return len(self._kept) - 1

    def _empty(self, name: str) -> Any:
        """Return an object of the class of that name, without attributes yet."""
        kind = getattr(self.module, name, None)
        if not isinstance(kind, type) or kind.__module__ != self.module.__name__:
            raise ProgramError(f"there is no class {name!r}")
        return object.__new__(kind)


class _Callback:
    """A function of the tests, as the program sees it."""

    def __init__(self, end: _End, number: int) -> None:
        self._end, self.number = end, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._end.ask("call", self, arguments, named)


class _Program(_End):
    def __init__(self, link: int, module: ModuleType) -> None:
        super().__init__(link, module)
        self._shared: list[str] = []

    def serve(self) -> None:
        while line := self._lines.readline():
            self._send(self._answer(json.loads(line)))

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        nodes, packer = question["nodes"], Packer(self._special)
        try:
            given = Unpacker(nodes, self._find)
            value = self._do(question["ask"], *given.get(question["value"]))
            reply = {"value": packer.pack(value), "nodes": packer.nodes}
            if value is None:  # then it may be what became of its arguments that counts
                after = Packer(self._special, [given.objects.get(place) for place in range(len(nodes))])
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

    def _do(self, verb: str, *given: Any) -> Any:
        if verb == "share":
            self._shared = given[0]
            return None
        if verb == "name":
            module, name = self.module, given[0]
            if not hasattr(module, name) and hasattr(module, "Solution"):
                return getattr(module.Solution(), name)  # a method of LeetCode's class
            return getattr(module, name)
        return _VERBS[verb](*given)

    def _special(self, value: Any) -> Node:
        if isinstance(value, _Callback):
            return "callback", value.number
        if isinstance(value, Coroutine):
            return "coroutine", self._keep(value)
        if isinstance(value, type) and issubclass(value, Exception):
            base = next(kind.__name__ for kind in value.__mro__ if kind.__name__ in _ERRORS)
            return "exception", [value.__name__, base]
        if type(value).__name__ in self._shared and not isinstance(value, type):
            return _made(value)
        return "object", self._keep(value)

    def _find(self, kind: str, content: Any) -> Any:
        if kind == "made":
            return self._empty(content[0])
        if kind == "callback":
            return _Callback(self, content)
        if kind == "named":
            return getattr(importlib.import_module(content[0]), content[1])
        return self._kept[content]


class _Tests(_End):
    def __init__(self, link: int, source: str) -> None:
        super().__init__(link, ModuleType("tests"))
        self._errors: dict[str, type[Exception]] = {}
        parsed = ast.walk(ast.parse(source))
        self.ask("share", [node.name for node in parsed if isinstance(node, ast.ClassDef)])

    def _receive(self) -> dict[str, Any]:
        try:
            return super()._receive()
        except Exception as error:
            _give_up(error)

    def _result(self, reply: dict[str, Any], packer: Packer) -> Any:
        try:
            value = Unpacker(reply["nodes"], self._find).get(reply["value"])
            if "changed" in reply:
                nodes = reply["changed"]
                if any(new[0] != old[0] for new, old in zip(nodes, packer.nodes, strict=False)):
                    raise ProgramError("arguments can't become of another type")
                Unpacker(nodes, self._find, packer.objects)
            names = reply.get("error")
        except Exception as error:
            _give_up(error)
        if names is not None:
            raise self._error(names, value if isinstance(value, list) else [])
        return value

    def _error(self, names: list[str], given: list[Any]) -> Exception:
        known = {**_ERRORS, **self._errors}
        kind = next((known[name] for name in names if name in known), ProgramError)
        if kind is ProgramError or set(names) & set(_ENDS_A_LOOP):
            return ProgramError(names[0], *given)
        try:
            return kind(*given)
        except TypeError:
            return ProgramError(names[0], *given)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            function, arguments, named = Unpacker(question["nodes"], self._find).get(question["value"])
        except Exception as error:
            _give_up(error)
        packer = Packer(self._special)
        try:
            return {"value": packer.pack(function(*arguments, **named)), "nodes": packer.nodes}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}

    def _special(self, value: Any) -> Node:
        if isinstance(value, Remote):
            return "object", value.__dict__["_number"]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", ".")
        if module in sys.stdlib_module_names and "." not in name and callable(value):
            return "named", [module, name]
        if type(value).__module__ == "tests":
            return _made(value)
        if callable(value):
            return "callback", self._keep(value)
        raise TypeError(f"tests can't hand a {type(value).__name__} to a program")

    def _find(self, kind: str, content: Any) -> Any:
        if kind == "made":
            return self._empty(content[0])
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

    async def _awaited(self, number: int) -> Any:
        return self.ask("await", Remote(self, number))


def _give_up(error: Exception) -> NoReturn:
    """End the tests, which have failed. No error, because tests may catch those."""
    print(f"the program ended, or wrote what is not a reply ({type(error).__name__})", file=sys.stderr, flush=True)
    os._exit(1)


def _made(value: Any) -> Node:
    """An object by the name of its class and what it holds."""
    held = dict(getattr(value, "__dict__", {}))
    slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    return "made", [type(value).__name__, held | {name: getattr(value, name) for name in slots if hasattr(value, name)}]


def _read(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        return stream.read()


class Remote:
    """An object of the program's, as the tests see it. It equals itself alone; where the program computes with it, what
    the program returns counts, but never a comparison."""

    def __init__(self, end: _End, number: int) -> None:
        self.__dict__.update(_end=end, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._end.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _TOLD:
            raise AttributeError(name)
        return self._end.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._end.ask("set", self, name, value)

    def __next__(self) -> Any:
        for value in self._end.ask("next", self):
            return value
        raise StopIteration

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(self._end.ask("isinstance", value, self))


_VERBS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "await": lambda coroutine: importlib.import_module("asyncio").run(coroutine),  # slow to import, seldom needed
    "next": lambda value: list(itertools.islice(value, 1)),
    "isinstance": isinstance,
}
_OF_ONE = {
    "len": len, "str": str, "repr": repr, "bool": bool, "int": int, "float": float, "abs": abs, "neg": operator.neg,
    "iter": lambda value: iter(list(itertools.islice(value, 100_000))), "getitem": operator.getitem,
    "setitem": operator.setitem, "delitem": operator.delitem,
}  # fmt: skip
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")  # of the program's


def _asks(verb: str, both: bool) -> Callable[..., Any]:
    def method(self: Remote, *given: Any) -> Any:
        if both and not isinstance(given[0], Remote):
            return NotImplemented
        return self._end.ask(verb, self, *given)

    return method


for _verb, _function in {**_OF_ONE, **{name: getattr(operator, name) for name in _OF_TWO}}.items():
    _VERBS[_verb] = _function
    setattr(Remote, f"__{_verb.strip('_')}__", _asks(_verb, _verb in _OF_TWO))
