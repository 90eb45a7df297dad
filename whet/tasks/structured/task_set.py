"""Structured output: facts put into a given JSON schema, written in JSON, YAML, TOML, XML or CSV."""

import csv
import io
import json
import random
from collections.abc import Iterator
from typing import Any, ClassVar
from xml.sax.saxutils import escape

from pydantic import AliasChoices, Field

from whet.base.errors import DataError
from whet.core.types import Message, Task
from whet.data.row import read_rows
from whet.processes.pool import WorkerLimits
from whet.tasks.base import Environments
from whet.tasks.cases import Kind
from whet.tasks.grading import GradingPool
from whet.tasks.gym.training_rows import GymRow
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


class Described(GymRow):
    """A row: what the user says, the schema, and, if known, the object that is wanted."""

    schema_str: str | dict[str, Any] = Field(validation_alias=AliasChoices("schema_str", "schema"))
    schema_type: Format = "json"
    response_mode: str | None = None
    expected: Any = None


class StructuredOutput(SourcedTasks):
    """Answers that are worth something only if they fit a schema, and then as much as they say right."""

    name: ClassVar[str] = "structured_output"
    variety: ClassVar[str] = "facts"

    format: Format = "json"
    """That of made-up tasks; rows name their own."""
    facts: int = Field(default=2, ge=1, le=len(FACTS))
    """Fields, beside the name, of the objects that are made up."""
    fence: bool = True
    """Whether the whole answer may stand in one fence."""
    content: Content = "share"
    """What a fitting answer earns: the ``share`` of fields as in the known object; 1 if ``exact``ly those; or the share
    that is ``filled``, which judges no content and is for rows without a known object."""
    max_chars: int = Field(default=20_000, ge=1)
    """Longest answer that is read."""
    limits: WorkerLimits = WorkerLimits(cpu_s=2)

    def open(self) -> "StructuredGrading":
        return StructuredGrading(self)

    def read(self, path: str) -> list[Task]:
        return [self._of(row) for row in read_rows(path, Described, self.columns)]

    def draw(self, rng: random.Random) -> Task:
        gold: dict[str, Any] = {"name": rng.choice(NAMES)}
        told = []
        for field in rng.sample(list(FACTS), self.facts):
            sentence, values = FACTS[field]
            gold[field] = rng.choice(values)
            told.append(sentence.format(name=gold["name"], value=gold[field]))
        kinds = {name: "integer" if isinstance(value, int) else "string" for name, value in gold.items()}
        original = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
        shown = "\n".join(f"- {name} ({kind})" for name, kind in kinds.items())
        form = self.format.upper()
        wanted = f"Write this as {form}, with these fields and no others:\n{shown}\nGive the {form} alone."
        asked = f"{' '.join(told)}\n\n{wanted}"
        return self._posed(self.ask(asked), original, self.format, gold)

    def _of(self, row: Described) -> Task:
        if row.response_mode == "tool_call":
            raise DataError(f"{row.where}: it asks for a call of a tool, not for a text; leave such rows out")
        if row.expected is None and self.content != "filled":
            raise DataError(
                f"{row.where}: field 'expected' is missing, the object that content={self.content} compares with; "
                "content=filled rewards any answer that fits the schema and is not empty"
            )
        given = row.schema_str
        try:
            original = json.loads(given) if isinstance(given, str) else given
            task = self._posed(row.shown(self.system), original, row.schema_type, row.expected)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{row.where}: field 'schema_str' can't be used: {error}") from None
        if row.expected is not None and not fits(row.expected, task.data["schema"], task.data["open"]):
            raise DataError(f"{row.where}: field 'expected' doesn't fit the schema, made strict")
        return task

    def _posed(self, prompt: list[Message], original: Any, form: Format, gold: Any) -> Task:
        data = {"schema": strict_schema(original), "open": open_schema(original), "format": form, "gold": gold}
        return Task("", prompt, data)

    def gold(self, task: Task) -> str | None:
        gold, form = task.data["gold"], task.data["format"]
        flat = isinstance(gold, dict) and not any(isinstance(value, dict | list) for value in gold.values())
        return written(gold, form) if gold is not None and (flat or form in ("json", "yaml")) else None

    def answers(self, task: Task) -> Iterator[tuple[Kind, str, str, float]]:
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "an empty object", "{}", 0.0
        yield "adversarial", "deep nesting", "[" * 9000, 0.0
        if (gold := self.gold(task)) is None:
            return
        form, known = task.data["format"], task.data["gold"]
        yield "good", "the known object", gold, 1.0
        yield "boundary", "in a fence", f"```{form}\n{gold}\n```", float(self.fence)
        yield "bad", "prose around it", f"Here it is:\n{gold}", 0.0
        if isinstance(known, dict):
            yield "adversarial", "one field more", written(known | {"zzz": 1}, form), 0.0
            yield "bad", "one field less", written(dict([*known.items()][1:]), form), 0.0


class StructuredGrading(Environments):
    """Grades in worker processes, where schemas and texts that never end are stopped."""

    def __init__(self, tasks: StructuredOutput) -> None:
        self.tasks, self.pool = tasks, GradingPool(limits=tasks.limits)

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if len(answer) > self.tasks.max_chars:
            return WRONG
        data = task.data
        known = (data["schema"], data["open"], data["gold"], self.tasks.content)
        return await self.pool.scores(grade_in_worker, answer, data["format"], self.tasks.fence, *known)

    async def close(self) -> None:
        self.pool.close()


def written(value: Any, form: Format) -> str:
    """Return a value in a format; in TOML, XML and CSV one without nesting."""
    if form in ("json", "yaml"):
        return json.dumps(value, ensure_ascii=False)
    if form == "toml":
        return "\n".join(f"{name} = {json.dumps(item)}" for name, item in value.items())
    if form == "xml":
        return "".join(["<row>", *(f"<{name}>{escape(str(item))}</{name}>" for name, item in value.items()), "</row>"])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([value.keys(), value.values()])
    return file.getvalue()
