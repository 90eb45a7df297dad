"""Office work: requests that are generated from a seed, or the files of WorkBench (arXiv 2405.00823,
olly-styles/WorkBench).

An episode is right if its final tables equal the tables after the right calls, regardless of the order of calls and
rows and of the ids of new rows. If the right calls change nothing, the policy must also have read a table that the
request is about.
"""

import ast
import csv
import random
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from pydantic import Field

from whet.base.errors import DataError
from whet.base.seeds import derive_seed
from whet.core.types import Task
from whet.tasks.cases import Answer
from whet.tasks.prompts import messages
from whet.tasks.scores import CORRECT
from whet.tasks.splits import Split, question_key
from whet.tasks.tools.base import SeededToolTasks, right_or_wrong, solution
from whet.tasks.tools.office_tools import NOW, TABLES, CustomerStatus, Office, Row, Tables, TaskList
from whet.tools.tool import ToolError
from whet.tools.toolbox import ToolLimits

Calls = list[tuple[str, dict[str, Any]]]
_FILES = ("emails", "calendar_events", "project_tasks", "customer_relationship_manager_data", "analytics_data")
_SEARCHES = ("search_emails", "search_events", "search_tasks", "search_customers", "total_visits_count")
_QUERIES = "_queries_and_answers.csv"
_SHORT = {"crm": "customer_relationship_manager"}  # abbreviations in the column "domains"
_PEOPLE = ("aisha.chen", "carlos.rodriguez", "dmitri.ivanov", "fatima.khan", "kofi.mensah", "nia.johnson")
_TOPICS = ("budget", "launch", "hiring", "website", "training", "roadmap")
_NAMES = ("Alex Brown", "Jordan Garcia", "Quinn Harris", "Riley Jackson", "Taylor White", "Casey Lopez")
# For each table: the request, the fields of the rows it is about, and the call for each of these rows.
_REQUESTS: dict[str, tuple[str, Row, str, Row]] = {
    "email": ("Delete all mails from {one}.", {"sender/recipient": "{one_at}"}, "delete_email", {"email_id": "{id}"}),
    "calendar": (
        "Cancel all meetings with {one}.",
        {"participant_email": "{one_at}"},
        "delete_event",
        {"event_id": "{id}"},
    ),
    "project_management": (
        "Give all of {one}'s tasks that are in progress to {two}.",
        {"assigned_to_email": "{one_at}", "list_name": "In Progress"},
        "update_task",
        {"task_id": "{id}", "field": "assigned_to_email", "new_value": "{two_at}"},
    ),
    "customer_relationship_manager": (
        "Reassign all of {one}'s leads to {two} in the crm.",
        {"assigned_to_email": "{one_at}", "status": "Lead"},
        "update_customer",
        {"customer_id": "{id}", "field": "assigned_to_email", "new_value": "{two_at}"},
    ),
}


@dataclass(frozen=True, slots=True)
class RightCalls:
    """The calls that do what is asked."""

    office: int  # its number
    tables: list[str]  # that the request is about
    calls: Calls


class OfficeTasks(SeededToolTasks[RightCalls]):
    """Give all of kofi's tasks that are in progress to nia. Solved by a search, and a call for each row it returns."""

    named_scores = CORRECT

    system: str | None = (
        f"You work in an office. It is Thursday, {NOW}. Do what is asked with the tools, and nothing else."
    )
    limits: ToolLimits = ToolLimits(max_calls=40)
    path: str | None = None
    """A folder with WorkBench's files; None: small offices are generated."""
    offices: int = Field(default=60, ge=1, le=1000)
    """Number of generated offices, each with different rows."""
    rows: int = Field(default=30, ge=1, le=1000)
    """Rows of each table of a generated office."""

    @cached_property
    def _offices(self) -> list[Tables]:
        if self.path is not None:
            names = zip(TABLES, _FILES, strict=True)
            return [{table: _read(Path(self.path) / f"{name}.csv") for table, name in names}]
        seeds = (derive_seed(self.seed, "office", number) for number in range(self.offices))
        return [generated(random.Random(seed), self.rows) for seed in seeds]

    def splits(self) -> dict[Split, list[Task[RightCalls]]]:
        return super().splits() if self.path is None else self._published(Path(self.path))

    def _published(self, folder: Path) -> dict[Split, list[Task[RightCalls]]]:
        rows = {
            row.get("query", ""): (file, row) for file in sorted(folder.glob(f"*{_QUERIES}")) for row in _read(file)
        }
        if not rows:
            raise DataError(f"data.path: {folder} has no file *{_QUERIES}")
        tasks = []
        for query in sorted(rows, key=question_key):
            file, row = rows[query]
            where = f"{file}: {query!r}"
            calls = _parsed(row.get("answer", ""), where)
            _make_calls(Office(self._offices[0]), calls, where)
            data = RightCalls(0, _tables(row, file, where), calls)
            tasks.append(Task(f"office/{query}", messages(self.system, query), data))
        return {"train": tasks[self.test_size :][: self.train_size], "test": tasks[: self.test_size]}

    def draw(self, rng: random.Random) -> tuple[str, RightCalls]:
        office, table, (owner, other) = rng.randrange(self.offices), rng.choice(TABLES), rng.sample(_PEOPLE, 2)
        if table == "analytics":
            day = _day(-rng.randint(1, 60))
            plot = {"time_min": day, "time_max": NOW[:10], "value_to_plot": "total_visits", "plot_type": "bar"}
            data = RightCalls(office, [table], [("analytics_create_plot", plot)])
            return f"Make a bar chart of total visits from {day} to today.", data
        request, about, tool, arguments = _REQUESTS[table]
        values = {
            "one": owner.split(".")[0], "two": other.split(".")[0], "one_at": _address(owner), "two_at": _address(other)
        }  # fmt: skip
        calls = []
        for row in self._offices[office][table]:
            if all(row[field] == value.format(**values) for field, value in about.items()):
                row_id = next(iter(row.values()))
                calls.append(
                    (f"{table}_{tool}", {key: part.format(id=row_id, **values) for key, part in arguments.items()})
                )
        return request.format(**values), RightCalls(office, [table], calls)

    def state(self, task: Task[RightCalls]) -> Office:
        return Office(self._offices[task.data.office])

    def score(self, task: Task[RightCalls], state: Office, answer: str) -> dict[str, float]:
        expected = self.state(task)
        before = expected._content()
        _make_calls(expected, task.data.calls, task.uid)
        changed = expected._content() != before
        read = not state._tables_read.isdisjoint(task.data.tables)
        return right_or_wrong(state._content() == expected._content() and (changed or read))

    def gold(self, task: Task[RightCalls]) -> Answer:
        searches = [(f"{table}_{_SEARCHES[TABLES.index(table)]}", dict[str, Any]()) for table in task.data.tables]
        return solution(*searches, *task.data.calls, answer="Done.")


def generated(rng: random.Random, rows: int) -> Tables:
    """Return the tables of a small office, drawn from ``rng``."""
    tables: Tables = {table: [] for table in TABLES}
    for number in range(rows):
        row_id, person = f"{number:08}", _address(rng.choice(_PEOPLE))
        topic, customer = rng.choice(_TOPICS), rng.choice(_NAMES)
        past, later = _day(-rng.randint(0, 60)), _day(rng.randint(1, 30))
        clock = f"{rng.randint(9, 17):02}:{rng.choice((0, 30)):02}:00"
        tables["email"].append(
            {"email_id": row_id, "inbox/outbox": "inbox", "sender/recipient": person, "subject": f"Update on {topic}",
             "sent_datetime": f"{past} {clock}", "body": f"There is news about the {topic}."}
        )  # fmt: skip
        tables["calendar"].append(
            {"event_id": row_id, "event_name": f"{topic} meeting", "participant_email": person,
             "event_start": f"{later} {clock}", "duration": str(rng.choice((30, 60)))}
        )  # fmt: skip
        tables["project_management"].append(
            {"task_id": row_id, "task_name": f"Plan the {topic}", "assigned_to_email": person,
             "list_name": rng.choice(get_args(TaskList)), "due_date": later, "board": "Design"}
        )  # fmt: skip
        tables["customer_relationship_manager"].append(
            {"customer_id": row_id, "customer_name": customer, "assigned_to_email": person, "customer_email": "",
             "customer_phone": "", "last_contact_date": past, "product_interest": "Software",
             "status": rng.choice(get_args(CustomerStatus)), "notes": "", "follow_up_by": later}
        )  # fmt: skip
        tables["analytics"].append(
            {"visitor_id": row_id, "date_of_visit": past, "page_views": "3", "session_duration_seconds": "20",
             "traffic_source": "direct", "user_engaged": "True"}
        )  # fmt: skip
    return tables


def _address(person: str) -> str:
    return f"{person}@atlas.com"


def _day(days: int) -> str:
    return str(date.fromisoformat(NOW[:10]) + timedelta(days))


def _read(path: Path) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as problem:
        raise DataError(f"can't read {path}: {problem.strerror}") from None


def _tables(row: Row, file: Path, where: str) -> list[str]:
    """Return the tables that a published request is about: the tables in its column ``domains``, else the table that
    its file is named after."""
    given = row.get("domains") or repr([file.name.removesuffix(_QUERIES)])
    try:
        named = ast.literal_eval(given)
        tables = [_SHORT.get(name, name) for name in named]
    except (SyntaxError, ValueError, TypeError):
        tables = [given]
    if not tables or not set(tables) <= set(TABLES):
        raise DataError(f"{where}: column 'domains' must name some of {', '.join(TABLES)}, not {given}")
    return tables


def _make_calls(office: Office, calls: Calls, where: str) -> None:
    """Make the right calls. Raises ``DataError`` for a call that fails."""
    for name, arguments in calls:
        try:
            getattr(office, "" if name.startswith("_") else name)(**arguments)
        except (AttributeError, TypeError, KeyError, ToolError) as problem:
            raise DataError(f"{where}: the call of {name} in column 'answer' fails: {problem}") from None


def _parsed(answer: str, where: str) -> Calls:
    """Return the calls in a list of texts such as ``email.delete_email.func(email_id="00000479")``."""
    try:
        calls = [ast.parse(text, mode="eval").body for text in ast.literal_eval(answer)]
        return [
            (
                ast.unparse(call.func).removesuffix(".func").replace(".", "_"),
                {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords},
            )
            for call in calls
            if isinstance(call, ast.Call)
        ]
    except (SyntaxError, ValueError, TypeError) as problem:
        raise DataError(f"{where}: column 'answer' is not a list of calls: {problem}") from None
