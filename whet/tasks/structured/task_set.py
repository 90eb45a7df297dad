"""Structured output: facts written as JSON, YAML, TOML, XML or CSV that fits a JSON schema."""

import csv
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from xml.sax.saxutils import escape

from pydantic import AliasChoices, Field

from whet.base.errors import DataError
from whet.base.strict_json import JsonObject
from whet.core.types import Message, Task
from whet.data.row import read_rows
from whet.processes.pool import WorkerLimits
from whet.tasks.base import Environments
from whet.tasks.cases import Kind
from whet.tasks.grading import POOLED, GradingPool
from whet.tasks.gym.rows import GymRow
from whet.tasks.structured.grader import WRONG, Content, grade_in_worker
from whet.tasks.structured.json_schema import fits, open_schema, strict_schema
from whet.tasks.structured.text import Format
from whet.tasks.task_source import SourcedTasks

NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Farah", "Goran", "Hana", "Ivo", "Julia")
FACTS: dict[str, tuple[str, tuple[Any, ...]]] = {  # field -> sentence, values
    "age": ("{name} is {value} years old.", tuple(range(18, 90))),
    "city": ("{name} lives in {value}.", ("Oslo", "Lima", "Cairo", "Quebec", "Hanoi", "Turin", "Perth", "Lagos")),
    "job": ("{name} works as a {value}.", ("baker", "pilot", "nurse", "judge", "welder", "farmer", "painter")),
    "bicycles": ("{name} owns {value} bicycles.", tuple(range(2, 20))),
    "instrument": ("{name} plays the {value}.", ("piano", "violin", "flute", "drums", "guitar", "harp")),
    "height_cm": ("{name} is {value} cm tall.", tuple(range(145, 205))),
}


class SchemaRow(GymRow):
    """A row: the prompt, the schema and, optionally, the right object."""

    schema_str: str | JsonObject = Field(validation_alias=AliasChoices("schema_str", "schema"))
    schema_type: Format = "json"
    response_mode: str | None = None
    expected: object = None


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of an answer, and the right object."""

    schema: JsonObject  # strict
    open: JsonObject  # the schema that admits further fields
    format: Format
    gold: object  # None: not known


class StructuredOutput(SourcedTasks[Shape]):
    """Tasks whose answers must fit a schema, and earn the share of their fields that are right."""

    named_scores = POOLED

    name: ClassVar[str] = "structured_output"
    variety: ClassVar[str] = "facts"

    format: Format = "json"
    """The format of generated tasks. Rows have their own."""
    facts: int = Field(default=2, ge=1, le=len(FACTS))
    """Fields of a generated object in addition to the name."""
    fence: bool = True
    """Accept an answer that is one fenced block."""
    content: Content = "share"
    """The reward of an answer that fits the schema: the ``share`` of fields that are right; 1 if ``exact``ly all are;
    or the share of fields that are ``filled``, for rows without a right object."""
    max_chars: int = Field(default=20_000, ge=1)
    """Longest answer that is graded, in characters."""
    limits: WorkerLimits = WorkerLimits(cpu_s=2)

    def open(self) -> "StructuredGrading":
        return StructuredGrading(self)

    def read(self, path: str) -> list[Task[Shape]]:
        return [self._of(row) for row in read_rows(path, SchemaRow, self.columns)]

    def draw(self, rng: random.Random) -> Task[Shape]:
        gold: JsonObject = {"name": rng.choice(NAMES)}
        sentences = []
        for field in rng.sample(list(FACTS), self.facts):
            sentence, values = FACTS[field]
            gold[field] = rng.choice(values)
            sentences.append(sentence.format(name=gold["name"], value=gold[field]))
        kinds = {name: "integer" if isinstance(value, int) else "string" for name, value in gold.items()}
        original = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
        shown = "\n".join(f"- {name} ({kind})" for name, kind in kinds.items())
        form = self.format.upper()
        instruction = f"Write this as {form}, with these fields and no others:\n{shown}\nGive the {form} alone."
        asked = f"{' '.join(sentences)}\n\n{instruction}"
        return self._posed(self.ask(asked), original, self.format, gold)

    def _of(self, row: SchemaRow) -> Task[Shape]:
        if row.response_mode == "tool_call":
            raise DataError(
                f"{row.where}: field 'response_mode' asks for a tool call, not for a text; remove such rows"
            )
        if row.expected is None and self.content != "filled":
            raise DataError(
                f"{row.where}: field 'expected' is missing, the right object for content={self.content}; "
                "content=filled rewards any answer that fits the schema and is not empty"
            )
        given = row.schema_str
        try:
            original = json.loads(given) if isinstance(given, str) else given
            task = self._posed(row.shown(self.system), original, row.schema_type, row.expected)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{row.where}: field 'schema_str' can't be used: {error}") from None
        if row.expected is not None and not fits(row.expected, task.data.schema, task.data.open):
            raise DataError(f"{row.where}: field 'expected' doesn't fit the strict form of the schema")
        return task

    def _posed(self, prompt: list[Message], original: Any, form: Format, gold: object) -> Task[Shape]:
        return Task("", prompt, Shape(strict_schema(original), open_schema(original), form, gold))

    def gold(self, task: Task[Shape]) -> str | None:
        gold, form = task.data.gold, task.data.format
        flat = isinstance(gold, dict) and not any(isinstance(value, dict | list) for value in gold.values())
        return written(gold, form) if gold is not None and (flat or form in ("json", "yaml")) else None

    def answers(self, task: Task[Shape]) -> Iterator[tuple[Kind, str, str, float]]:
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "an empty object", "{}", 0.0
        yield "adversarial", "deep nesting", "[" * 9000, 0.0
        if (gold := self.gold(task)) is None:
            return
        form, value = task.data.format, task.data.gold
        yield "good", "the right object", gold, 1.0
        yield "boundary", "in a fence", f"```{form}\n{gold}\n```", float(self.fence)
        yield "bad", "prose around it", f"Here it is:\n{gold}", 0.0
        if isinstance(value, dict):
            yield "adversarial", "one field more", written(value | {"zzz": 1}, form), 0.0
            yield "bad", "one field less", written(dict([*value.items()][1:]), form), 0.0


class StructuredGrading(Environments[Shape]):
    """Grades in worker processes, which stop at a time limit on hostile schemas and texts."""

    named_scores = POOLED

    def __init__(self, tasks: StructuredOutput) -> None:
        self.tasks, self.pool = tasks, GradingPool(limits=tasks.limits)

    async def grade(self, task: Task[Shape], answer: str) -> dict[str, float]:
        if len(answer) > self.tasks.max_chars:
            return WRONG
        form = task.data
        criteria = (form.schema, form.open, form.gold, self.tasks.content)
        return await self.pool.scores(grade_in_worker, answer, form.format, self.tasks.fence, *criteria)

    async def close(self) -> None:
        self.pool.close()


def written(value: Any, form: Format) -> str:
    """Return the text of a value in a format. For TOML, XML and CSV the value must have no nesting."""
    if form in ("json", "yaml"):
        return json.dumps(value, ensure_ascii=False)
    if form == "toml":
        return "\n".join(f"{name} = {json.dumps(item)}" for name, item in value.items())
    if form == "xml":
        return "".join(["<row>", *(f"<{name}>{escape(str(item))}</{name}>" for name, item in value.items()), "</row>"])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([value.keys(), value.values()])
    return file.getvalue()
