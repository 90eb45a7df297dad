"""What a model can call: a typed Python function, or the public methods of an object that keeps an episode's state.

The JSON schema of the arguments comes from the signature and the docstring, and arguments are checked by it before the
function runs. Knows no model and no conversation.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs, to_jsonable_python

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.processes.threads import run_in_thread

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")  # as the OpenAI API has it
_JSON = json.JSONEncoder(ensure_ascii=False, default=partial(to_jsonable_python, fallback=str))


class ToolError(Exception):
    """The model did something wrong. The message is what it is told."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as a model sees it, and how it is run."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments, an object
    # Takes the arguments and the most characters of a result. Raises ToolError where the arguments are wrong.
    run: Callable[[dict[str, Any], int], Awaitable[str]]
    ordered: bool = False  # keeps state: the calls of one reply run one after the other
    alive: Callable[[], Awaitable[None]] | None = None  # asked after a time-out; raises where the call is not to blame

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"a tool is called {self.name!r}; use 1 to 64 letters, digits, _ and -")

    @property
    def schema(self) -> dict[str, Any]:
        """The form in which chat templates and the OpenAI API take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def tool(function: Callable[..., Any], ordered: bool = False) -> Tool:
    """Make a tool of a function, sync or async. Its docstring tells the model what it does and, below ``Args:``, what
    its arguments are. A sync function runs on a thread of its own. What it returns is shown as the text that it is, as
    JSON, or as what an iterator of texts gives, of which no more is read than is shown.

    Raises ``ConfigError`` for a function without a docstring, or with a parameter that has no type or no name.
    """
    bound = inspect.ismethod(function)
    interface = _interface(function.__func__ if bound else function, bound)  # type: ignore[attr-defined]
    name = f"tool {interface.name}"

    async def run(arguments: dict[str, Any], limit: int) -> str:
        call = partial(function, **interface.checked(arguments))
        if not inspect.iscoroutinefunction(function):

            def work() -> str | Awaitable[object]:
                result = call()
                return result if inspect.isawaitable(result) else bounded(result, limit)

            said = await run_in_thread(work, name)
            if isinstance(said, str):
                return said
            result = await said  # a plain function that returns a coroutine
        else:
            result = await call()
        return await run_in_thread(lambda: bounded(result, limit), name)

    return Tool(interface.name, interface.description, interface.parameters, run, ordered)


def bounded(result: Any, limit: int) -> str:
    """Return a result as text of at most ``limit`` characters, and a mark where there is more.

    >>> bounded(iter(["ab", "cd"]), 3)
    'abc\\n[the rest is left out]'
    """
    if result is None:
        return "done"
    text = ""
    for part in (
        [result] if isinstance(result, str) else result if isinstance(result, Iterator) else _JSON.iterencode(result)
    ):
        text += part[: limit + 1 - len(text)]
        if len(text) > limit:
            return f"{text[:limit]}\n[the rest is left out]"
    return text


def tools_of(source: object) -> list[Tool]:
    """The tools that something stands for: a ``Tool``, a function, a list of such, or an object, whose public methods
    are tools that share its state."""
    if isinstance(source, Tool):
        return [source]
    if isinstance(source, Iterable):
        return [found for part in source for found in tools_of(part)]
    if inspect.isroutine(source):
        return [tool(source)]
    names = dict.fromkeys(name for kind in reversed(type(source).__mro__) for name in vars(kind))
    public = [name for name in names if not name.startswith("_") and inspect.isfunction(getattr(type(source), name))]
    return [tool(getattr(source, name), ordered=True) for name in public]


class _Untitled(GenerateJsonSchema):
    """Titles repeat the names, and cost the model tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Interface:
    name: str
    description: str
    parameters: dict[str, Any]
    adapter: TypeAdapter[Any]

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function's types have them. Raises ``ToolError`` naming all that are wrong."""
        try:
            checked: dict[str, Any] = self.adapter.validate_python(ArgsKwargs((), dict(arguments)))
            return checked
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
            raise ToolError(f"wrong arguments for {self.name}: {wrong}") from None


@lru_cache(maxsize=1024)
def _interface(function: Callable[..., Any], bound: bool) -> _Interface:
    with extra("tools", "a tool"):
        from docstring_parser import parse

    name, doc = function.__name__, parse(inspect.getdoc(function) or "")
    description = (doc.description or "").strip()
    parameters = list(inspect.signature(function).parameters.values())[int(bound) :]
    for one in parameters:
        if one.annotation is one.empty or one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise ConfigError(f"the tool {name} has the parameter {one}; give it a type, and no * and no /")
    if not description:
        raise ConfigError(f"the tool {name} has no docstring: say in it what it does, for the model to read")

    def arguments(**checked: Any) -> dict[str, Any]:
        return checked

    # pydantic reads the function's signature here, and calls this instead of it.
    arguments.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    arguments.__annotations__ = {one.name: one.annotation for one in parameters}
    arguments.__module__ = function.__module__
    checks: Any = arguments
    try:
        adapter = TypeAdapter[Any](checks)
        schema = adapter.json_schema(schema_generator=_Untitled)
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise ConfigError(f"the tool {name} has a type that JSON can't hold: {error.message}") from None
    for about in doc.params:
        if about.arg_name in schema["properties"] and about.description:
            schema["properties"][about.arg_name].setdefault("description", about.description)
    return _Interface(name, description, schema, adapter)
