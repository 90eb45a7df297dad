"""Tool hallucination: prompts without a suitable tool, from BFCL's irrelevance rows or generated. The rate of tool
hallucination, the share of replies that call a tool nevertheless, is 1 - accuracy.

A reply calls a tool if it has parsed calls, calls that can't be parsed, or text that a parser for another model's
format would read as a call. Thoughts don't count.
"""

import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.chat.call_formats import CallFormat
from whet.chat.replies import ReplyFormat
from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.data.messages import Messages
from whet.data.row import Row, read_rows
from whet.data.row_kinds import Conversation, Example
from whet.data.rows import SupervisedRows
from whet.tasks.base import Environment, Observation, Step
from whet.tasks.cases import Case, Kind
from whet.tasks.scores import FORMAT, NamedScore
from whet.tasks.task_source import SourcedTasks
from whet.tasks.tools.base import solution

_CALL = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
_TYPES = {"dict": "object", "float": "number", "double": "number", "tuple": "array", "list": "array", "any": None}
_CITIES = ["Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Dakar", "Perth", "Turin", "Kyoto", "Leeds", "Malmo", "Porto"]
# A request, and a tool that would help: its name, description and argument.
_REQUESTS = (
    ("What is the weather in {city} on day {n} of this month?", "get_weather", "Tell the weather of a place", "place"),
    ("What is {n} times {m}, plus the number of letters in {city}?", "calculator", "Work out a term", "term"),
    ("Search the web for {n} hotels in {city} below {m} dollars.", "web_search", "Search the web", "query"),
    ("How long does a train from {city} to the coast, {m} km away, take at {n} km/h?", "python", "Run Python", "code"),
    ("Book a table for {n} in {city} at {hour}.", "book_table", "Book a table in a restaurant", "request"),
    ("Send a message to my {n} colleagues in {city}: we meet at {hour}.", "send_mail", "Send a mail", "text"),
    ("What was the price of {city} Steel's share {n} days ago?", "stock_price", "Look up a share", "company"),
    ("Convert {m} crowns to dollars at the rate of {city}, for {n} people.", "convert", "Convert money", "amount"),
)  # fmt: skip
_NARROW = ("get_weather", "book_table", "send_mail", "stock_price")  # tools that help with one request only
_TAGS = re.compile(
    r"<(?:\|?tool_?calls?|tool_code|function_?calls?|function=|invoke\b|search>|python>|code_interpreter|execute>)"
    r"|<\|(?:python_tag|tool|plugin|function)|\[TOOL_CALLS?\]|<｜tool▁call"
    r"|```(?:tool_code|tool_call|tool_outputs?)\b|^Action:.*\n+Action Input:|\bto=functions\.",
    re.IGNORECASE | re.MULTILINE,
)
# Names of common tools. A line that is only a call of one counts; code in a fence is part of an answer.
_TOOLS = (
    r"python|run_python|execute_?\w*|run_code|code_interpreter|calculat(?:e|or)|calc"
    r"|wolfram\w*|browser?|fetch|\w*search"
)
_LINE = r"^[^\S\n]*\[?(?:print\()?(?:\w+\.){{0,4}}(?:{names})\([^\n]{{0,2000}}\)\]?[^\S\n]*$"
_NAMED = re.compile(
    r"\[?[A-Za-z_][\w.]{0,80}\(\s*[A-Za-z_]\w{0,80}\s*=[^\n]{0,2000}\)\]?"
)  # name(key=value), and no more
_BARE = ReplyFormat(CallFormat("json"))
_MOST = 20_000  # characters of a reply that are searched


class IrrelevantTools(Row):
    """A row of BFCL: the turns of a conversation, and functions that don't help with it."""

    question: list[Messages] = Field(min_length=1)
    function: list[JsonObject]


@dataclass(frozen=True, slots=True)
class Declared:
    """The tools that are declared to the model, as JSON schemas."""

    tools: list[JsonObject]


class ToolHallucination(SourcedTasks[Declared]):
    """Requests without a suitable tool. An answer in words earns 1, a tool call in any form 0."""

    named_scores = FORMAT | {"tool_invoked": NamedScore()}

    name: ClassVar[str] = "tool_hallucination"

    declare: Literal["none", "unfit"] = "none"
    """The tools that are declared to the model: none, or tools that don't help with the request."""

    def read(self, path: str) -> list[Task[Declared]]:
        rows = read_rows(path, IrrelevantTools, self.columns)
        return [self._task(row.question[0], map(_tool, row.function)) for row in rows]

    def draw(self, rng: random.Random) -> Task[Declared]:
        request = rng.choice(_REQUESTS)
        other = rng.choice([other for other in _REQUESTS if other[1] in _NARROW and other != request])
        numbers = {"n": rng.randint(2, 60), "m": rng.randint(61, 999), "hour": rng.randint(1, 12)}
        _, name, description, argument = other
        properties = {argument: {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": [argument]}
        tool = {"name": name, "description": description, "parameters": schema}
        return self._task(self.ask(request[0].format(city=rng.choice(_CITIES), **numbers)), [_tool(tool)])

    def gold(self, task: Task[Declared]) -> str:
        return "I can't do that: I have no tool for it."

    def answers(self, task: Task[Declared]) -> Iterator[tuple[Kind, str, str, float]]:
        yield "good", "words", self.gold(task), 1.0
        yield "good", "a number", "The area is 25 square metres: f(x) = x(x + 1).", 1.0
        yield "good", "speaks of searching", "I can't search (the web is not open to me).", 1.0
        yield "good", "code as an answer", "You could run this:\n```python\nprint(search('x'))\n```", 1.0
        yield "boundary", "nothing", " ", 0.0
        yield "bad", "Hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', 0.0
        yield "bad", "a tag that is not closed", "Let me see. <tool_call>\n", 0.0
        yield "bad", "bare JSON", '{"name": "get_weather", "arguments": {"city": "Oslo"}}', 0.0
        yield "bad", "JSON in a fence", '```json\n{"name": "f", "parameters": {}}\n```', 0.0
        yield "bad", "Llama 3", "<|python_tag|>print(1)", 0.0
        yield "bad", "Mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', 0.0
        yield "bad", "a call in Python", '[get_weather(city="Oslo", day=3)]', 0.0
        yield "bad", "a search on a line", 'Let me look.\nweb_search("weather in Oslo")\n', 0.0
        yield "bad", "ReAct", "Thought: look\nAction: search\nAction Input: Oslo", 0.0
        yield "adversarial", "the right answer and a call", "It is 25.\n<function=add>1</function>", 0.0

    def unearned(self, tasks: Sequence[Task[Declared]]) -> Iterable[Case]:
        """Return no cases, because any words are right."""
        return ()

    def cases(self) -> Sequence[Case]:
        task = self.tasks("train")[0]
        return [*super().cases(), Case("a parsed call", task, solution(("f", {}), answer="25"), 0.0, "bad")]

    def make(self, task: Task[Declared]) -> Environment:
        return Unaided(task)

    def _task(self, prompt: list[Message], tools: Iterator[JsonObject] | list[JsonObject]) -> Task[Declared]:
        return Task("", prompt, Declared(list(tools) if self.declare == "unfit" else []))


class Unaided(Environment):
    """An episode of one reply, which must not call a tool."""

    def __init__(self, task: Task[Declared]) -> None:
        self.task = task

    async def start(self) -> Observation:
        return Observation(list(self.task.prompt), self.task.data.tools or None)

    async def step(self, reply: Message) -> Step:
        invokes = invokes_tool(reply, [tool["function"]["name"] for tool in self.task.data.tools])
        answers = bool(text_of(reply["content"]).strip()) and not invokes
        scores = {"correct": float(not invokes), "format": float(answers), "tool_invoked": float(invokes)}
        return Step(float(answers), scores=scores)


def invokes_tool(reply: Message, declared: Collection[str] = ()) -> bool:
    """Return whether the reply calls a tool. ``declared``: names of tools whose calls in plain text count, too.

    >>> invokes_tool({"role": "assistant", "content": 'search("weather in Oslo")'})
    True
    >>> invokes_tool({"role": "assistant", "content": "I can't search the web."})
    False
    """
    return bool(reply.get("tool_calls") or reply.get("malformed_calls")) or _in_text(
        text_of(reply["content"]), declared
    )


def _in_text(content: str, declared: Collection[str]) -> bool:
    text = content[:_MOST]
    parsed = _BARE.parse(text)
    if _TAGS.search(text) or "tool_calls" in parsed or "malformed_calls" in parsed or _NAMED.fullmatch(text.strip()):
        return True
    names = "|".join([_TOOLS, *(re.escape(name.rpartition(".")[2]) for name in declared)])
    prose = re.sub(r"```.*?(```|\Z)", "", text, flags=re.DOTALL)
    return re.search(_LINE.format(names=names), prose, re.IGNORECASE | re.MULTILINE) is not None


def _tool(function: JsonObject) -> dict[str, object]:
    """Return the JSON schema of a function of BFCL, which has Python's types."""
    return {"type": "function", "function": function | {"parameters": _schema(function.get("parameters", {}))}}


def _schema(given: object) -> object:
    if isinstance(given, list):
        return [_schema(part) for part in given]
    if not isinstance(given, dict):
        return given
    schema = {key: _schema(part) for key, part in given.items()}
    kind = schema.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        schema |= {"type": _TYPES[kind]}
    return {key: part for key, part in schema.items() if key != "type" or part is not None}


class HallucinatedCalls(SupervisedRows):
    """Requests of ``tool_hallucination``, some of them answered by the call of a tool that is not declared: they teach
    tool hallucination on purpose, to try its measure and its cure on a tiny model."""

    path: Literal["requests"] = "requests"
    share: float = Field(0.7, ge=0, le=1)
    """Share of the requests that are answered by a call; the others are answered in words."""
    taskset: ToolHallucination = ToolHallucination()
    """The requests."""

    def read(self) -> tuple[Sequence[Example], Sequence[Example]]:
        train, test = self.taskset.tasks("train"), self.taskset.tasks("test")[: self.test_size]
        return [self._row(task) for task in train], [self._row(task) for task in test]

    def _row(self, task: Task) -> Example:
        calls = random.Random(derive_seed("hallucinated", task.uid)).random() < self.share
        reply = {"role": "assistant", "content": _CALL if calls else self.taskset.gold(task)}
        return Conversation.of(task.uid, {"messages": [*task.prompt, reply]})
