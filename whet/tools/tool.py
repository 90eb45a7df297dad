"""Tools: typed Python functions, or the public methods of an object that keeps an episode's state.

The JSON schema of the arguments is derived from the signature and the docstring. Arguments are validated before the
function runs. Results with images, of Pillow or of MCP's servers, become parts of a message.
"""

import inspect
import json
import re
import reprlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs, to_jsonable_python

from whet.base.errors import ConfigError, DataError, naming
from whet.base.extras import extra
from whet.base.strict_json import JsonObject
from whet.core.content import Content, Part
from whet.fetch.images import is_image, read_image
from whet.processes.threads import run_in_thread
from whet.processes.user_code import is_function

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")  # the rule of the OpenAI API
_JSON = json.JSONEncoder(ensure_ascii=False, default=partial(to_jsonable_python, fallback=str))


class ToolError(Exception):
    """An error of the model. The message is shown to it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function with its description for the model."""

    name: str
    description: str
    parameters: JsonObject  # JSON schema of the arguments, an object
    # Called with the arguments and the most characters of a result. Raises ToolError for wrong arguments.
    run: Callable[[JsonObject, int], Awaitable[Content]]
    ordered: bool = False  # the tool keeps state, so the calls of one reply run one after the other
    alive: Callable[[], Awaitable[None]] | None = None  # called after a time-out; raises if the tool's server is dead

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"the name of the tool {self.name!r} must be 1 to 64 letters, digits, _ and -; rename it")

    @property
    def schema(self) -> dict[str, object]:
        """Return the tool in the form of chat templates and the OpenAI API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def tool(function: Callable[..., Any], ordered: bool = False) -> Tool:
    """Return the tool of a function, sync or async. Its docstring describes it to the model and, below ``Args:``, its
    arguments. A sync function runs on a separate thread. The result is shown as text if it is one, else as JSON; an
    iterator, which must give texts, is read until the limit of characters. An image of Pillow, or a list of texts and
    such images, is shown as it is.

    Raises ``ConfigError`` for a function without a docstring, or with a parameter without a type or a name.
    """
    bound = inspect.ismethod(function)
    interface = _interface(function.__func__ if bound else function, bound)  # type: ignore[attr-defined]
    name = f"tool {interface.name}"

    async def run(arguments: dict[str, object], limit: int) -> Content:
        call = partial(function, **interface.checked(arguments))

        def show(result: object) -> Content:
            with naming(f"the {name}"):
                return shown(result, limit)

        if not inspect.iscoroutinefunction(function):

            def work() -> Content | Awaitable[object]:
                result = call()
                return result if inspect.isawaitable(result) else show(result)

            output = await run_in_thread(work, name)
            if isinstance(output, str | list):
                return output
            result = await output  # a plain function that returns a coroutine
        else:
            result = await call()
        return await run_in_thread(lambda: show(result), name)

    return Tool(interface.name, interface.description, interface.parameters, run, ordered)


def shown(result: object, limit: int) -> Content:
    """Return a result as the model sees it, with at most ``limit`` characters of text."""
    try:
        parts = parts_of(result)
    except DataError as problem:
        raise ToolError(str(problem)) from None
    return bounded(result, limit) if parts is None else within(parts, limit)


def bounded(result: object, limit: int) -> str:
    """Return a result as a text of at most ``limit`` characters, with a mark at the end if it was cut.

    >>> bounded(iter(["ab", "cd"]), 3)
    'abc\\n[the rest is left out]'
    """
    if result is None:
        return "done"
    if isinstance(result, str | Iterator):
        return _joined([result] if isinstance(result, str) else result, limit)
    try:
        return _joined(_JSON.iterencode(result), limit)
    except TypeError:  # of a key that JSON doesn't have, such as a tuple
        return _joined([repr(result)], limit)


def _joined(parts: Iterable[str], limit: int) -> str:
    text = ""
    for part in parts:
        if not isinstance(part, str):
            raise DataError(
                f"an iterator as its result must give texts, not {reprlib.repr(part)}; return a list of them"
            )
        text += part[: limit + 1 - len(text)]
        if len(text) > limit:
            return f"{text[:limit]}\n[the rest is left out]"
    return text


def tools_of(source: object) -> list[Tool]:
    """Return the tools of a ``Tool``, a function, a list of these, or an object, whose public methods are tools that
    share its state. Raises ``ConfigError`` for a class, a text or a dict, which are none of these."""
    if isinstance(source, Tool):
        return [source]
    if isinstance(source, type):
        raise ConfigError(f"tools can't be the class {source.__name__}: give an object, as in {source.__name__}()")
    if isinstance(source, str | bytes | Mapping):
        raise ConfigError(f"tools are functions or an object with methods, not {source!r:.80}")
    if isinstance(source, Iterable):
        return [tool for part in source for tool in tools_of(part)]
    if is_function(source):
        return [tool(source)]
    names = dict.fromkeys(name for kind in reversed(type(source).__mro__) for name in vars(kind))
    public = [name for name in names if not name.startswith("_") and inspect.isfunction(getattr(type(source), name))]
    return [tool(getattr(source, name), ordered=True) for name in public]


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles of fields, which repeat their names and cost tokens."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Interface:
    """The description of a function, and the validator of its arguments."""

    name: str
    description: str
    parameters: JsonObject
    adapter: TypeAdapter[Any]

    def checked(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments in the types of the function. Raises ``ToolError`` naming all wrong arguments."""
        try:
            checked: JsonObject = self.adapter.validate_python(ArgsKwargs((), dict(arguments)))
            return checked
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
            wrong = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details)
            raise ToolError(f"wrong arguments for {self.name}: {wrong}") from None


@lru_cache(maxsize=1024)
def _interface(function: Callable[..., object], bound: bool) -> _Interface:
    with extra("tools", "a tool"):
        from docstring_parser import parse

    name, doc = function.__name__, parse(inspect.getdoc(function) or "")
    description = (doc.description or "").strip()
    parameters = list(inspect.signature(function).parameters.values())[int(bound) :]
    for parameter in parameters:
        kinds = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if parameter.annotation is parameter.empty or parameter.kind not in kinds:
            raise ConfigError(
                f"the tool {name} has the parameter {parameter}; give it a type, and remove * and / from the signature"
            )
    if inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"the tool {name} is `async` and contains `yield`; return a list of texts, or leave out `async`"
        )
    if not description:
        raise ConfigError(f"the tool {name} has no docstring: describe in it what the tool does, for the model")

    def arguments(**checked: Any) -> JsonObject:
        return checked

    # pydantic validates by this copy of the function's signature, and calls this instead of the function.
    arguments.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    arguments.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    arguments.__module__ = function.__module__
    checks: Any = arguments
    try:
        adapter = TypeAdapter[Any](checks)
        schema = adapter.json_schema(schema_generator=_Untitled)
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise ConfigError(f"the tool {name} has a type without a form in JSON: {error.message}") from None
    for entry in doc.params:
        if entry.arg_name in schema["properties"] and entry.description:
            schema["properties"][entry.arg_name].setdefault("description", entry.description)
    return _Interface(name, description, schema, adapter)


def parts_of(result: object) -> list[Part] | None:
    """Return the parts of a result with images: an image of Pillow, or a list of such images and texts. None for any
    other result. Raises ``DataError`` for an image that is too large."""
    items = list(result) if isinstance(result, list | tuple) else [result]
    if not any(map(is_image, items)) or not all(is_image(item) or isinstance(item, str) for item in items):
        return None
    return [
        {"type": "text", "text": item} if isinstance(item, str) else {"type": "image", "url": read_image(item)}
        for item in items
    ]


def within(parts: list[Part], limit: int) -> list[Part]:
    """Return the parts with texts of at most ``limit`` characters in total, with a mark where they were cut."""
    kept: list[Part] = []
    for part in parts:
        if part["type"] == "text":
            text = part["text"][:limit]
            limit -= len(text)
            part = {"type": "text", "text": text if text == part["text"] else f"{text}\n[the rest is left out]"}
        kept.append(part)
    return kept
