"""Functions and objects as tools: their schemas, the validation of arguments, and errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Optional

import pytest
from pydantic import BaseModel

from whet.base.errors import ConfigError, DataError
from whet.tools.source import Functions
from whet.tools.tool import Tool, ToolError, tool, tools_of


class Place(BaseModel):
    city: str
    code: int = 0


def weather(place: Place, unit: Literal["C", "F"] = "C", days: list[int] = [], note: Optional[str] = None) -> str:  # noqa: B006, UP045
    """Return the weather.

    Args:
        place: Where.
        unit: Of the temperature.
    """
    return f"{place.city} {unit} {days} {note}"


async def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def run(made: Tool, arguments: dict[str, Any], limit: int = 100) -> str:
    return asyncio.run(made.run(arguments, limit))  # type: ignore[arg-type]


def test_the_schema_comes_from_signature_and_docstring() -> None:
    made = tool(weather)
    function = made.schema["function"]
    assert made.schema["type"] == "function"
    assert (function["name"], function["description"]) == ("weather", "Return the weather.")
    properties = function["parameters"]["properties"]
    assert function["parameters"]["required"] == ["place"]
    assert properties["unit"] == {
        "default": "C",
        "description": "Of the temperature.",
        "enum": ["C", "F"],
        "type": "string",
    }
    assert properties["days"]["items"] == {"type": "integer"}
    assert not any("title" in one for one in properties.values())


def test_arguments_are_checked_and_converted() -> None:
    made = tool(weather)
    assert run(made, {"place": {"city": "Rome"}, "days": ["1", 2]}) == "Rome C [1, 2] None"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "place: Missing required argument"),
        ({"place": {"city": "Rome"}, "unit": "K"}, "unit: Input should be 'C' or 'F'"),
        ({"place": {"city": 3}}, "place.city: Input should be a valid string"),
        ({"place": {"city": "Rome"}, "size": 3}, "size: Unexpected keyword argument"),
    ]
    for arguments, why in wrong:
        with pytest.raises(ToolError, match=why):
            run(made, arguments)


def test_functions_may_be_async_and_return_any_json_value() -> None:
    assert run(tool(double), {"number": 4}) == "8"

    def several() -> dict[str, Any]:
        """Return several."""
        return {"a": [1, None], "p": Place(city="Łódź"), "o": object}

    assert run(tool(several), {}).startswith('{"a": [1, null], "p": {"city": "Łódź", "code": 0}, "o": ')

    def by_place() -> dict[tuple[int, int], str]:
        """Return what is where."""
        return {(1, 2): "x" * 50}

    assert run(tool(by_place), {}, limit=11) == "{(1, 2): 'x\n[the rest is left out]"

    def nothing() -> None:
        """Do it."""

    assert run(tool(nothing), {}) == "done"


def test_no_more_of_a_result_is_read_than_is_shown() -> None:
    read = 0

    def endless() -> Any:
        """Never end."""
        nonlocal read
        while True:
            read += 1
            yield "x" * 10

    shown = run(tool(endless), {}, limit=25)
    assert shown == "x" * 25 + "\n[the rest is left out]"
    assert read == 3

    def long() -> str:
        """Write long."""
        return "y" * 1000

    assert run(tool(long), {}, limit=5) == "yyyyy\n[the rest is left out]"

    def many() -> list[int]:
        """Return many."""
        return [1] * 1_000_000

    assert run(tool(many), {}, limit=5) == "[1, 1\n[the rest is left out]"


def test_an_iterator_of_values_that_are_not_texts_is_refused_in_words() -> None:
    def numbers() -> Any:
        """Count."""
        yield "1, "
        yield 2

    with pytest.raises(
        DataError, match=r"the tool numbers: an iterator as its result must give texts, not 2; return a list"
    ):
        run(tool(numbers), {})


class Counter:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        """Add to the count."""
        self.count += number
        return self.count

    def _hidden(self) -> None:
        """Not a tool."""

    @property
    def seen(self) -> int:
        return self.count


def test_the_public_methods_of_an_object_are_tools_that_share_its_state() -> None:
    (add,) = tools_of(Counter())
    assert (add.name, add.ordered) == ("add", True)
    assert list(add.parameters["properties"]) == ["number"]
    assert run(add, {"number": 2}) == "2"
    assert run(add, {"number": 3}) == "5"
    assert [one.name for one in tools_of([weather, add, [double]])] == ["weather", "add", "double"]


def no_docstring(a: int) -> int:
    return a


def no_type(a) -> int:  # type: ignore[no-untyped-def]
    """Has none."""
    return 0


def many_types(*a: int) -> int:
    """Has many."""
    return 0


def odd_type(a: asyncio.Lock) -> int:
    """Has an odd one."""
    return 0


async def yielding(a: int) -> AsyncIterator[int]:
    """Yields."""
    yield a


@pytest.mark.parametrize(
    ("function", "why"),
    [(no_docstring, "no docstring"), (no_type, "give it a type"), (many_types, "remove \\*"),
     (odd_type, "without a form in JSON"), (lambda: 3, "no docstring"), (yielding, "is `async` and contains `yield`")],
)  # fmt: skip
def test_functions_without_a_schema_are_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        tool(function)


def test_what_is_no_source_of_tools_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"tools can't be the class Place: give an object, as in Place\(\)"):
        tools_of(Place)
    for source in ("my_tools:weather", {"weather": weather}, [{"weather": weather}]):
        with pytest.raises(ConfigError, match=r"tools are functions or an object with methods, not .*weather"):
            tools_of(source)
    with pytest.raises(ConfigError, match=r"data.tools: math:pi has no tool: name a function, a list"):
        Functions(path="math:pi").open()
