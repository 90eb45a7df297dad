"""Objects of a program in the process of its tests, and the operations that tests ask of them; see
``remote_calls``."""

import importlib
import itertools
import operator
from collections.abc import Callable
from typing import Any, Protocol

_FORWARDED = ("__name__", "__doc__")


class Asking(Protocol):
    """An end of the connection of two processes."""

    def ask(self, verb: str, *arguments: object) -> object:
        """Return the other side's reply, or raise its error."""
        ...


class Remote:
    """An object of the program, in the tests' process. It equals only itself: operations run in the program, but never
    comparisons."""

    def __init__(self, end: Asking, number: int) -> None:
        self.__dict__.update(_end=end, _number=number)

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._end.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _FORWARDED:
            raise AttributeError(name)
        return self._end.ask("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._end.ask("set", self, name, value)

    def __next__(self) -> object:
        for value in self._end.ask("next", self):
            return value
        raise StopIteration

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and bool(self._end.ask("isinstance", value, self))


VERBS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "await": lambda coroutine: importlib.import_module("asyncio").run(coroutine),  # slow to import, rarely needed
    "next": lambda value: list(itertools.islice(value, 1)),
    "isinstance": isinstance,
}
_WITH_ANY = {
    "len": len, "str": str, "repr": repr, "bool": bool, "int": int, "float": float, "abs": abs, "neg": operator.neg,
    "iter": lambda value: iter(list(itertools.islice(value, 100_000))), "getitem": operator.getitem,
    "setitem": operator.setitem, "delitem": operator.delitem,
}  # fmt: skip
_WITH_REMOTE = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
)  # both operands are the program's


def _forward(verb: str, both: bool) -> Callable[..., object]:
    def method(self: Remote, *arguments: object) -> object:
        if both and not isinstance(arguments[0], Remote):
            return NotImplemented
        return self._end.ask(verb, self, *arguments)

    return method


for _verb, _function in {**_WITH_ANY, **{name: getattr(operator, name) for name in _WITH_REMOTE}}.items():
    VERBS[_verb] = _function
    setattr(Remote, f"__{_verb.strip('_')}__", _forward(_verb, _verb in _WITH_REMOTE))
