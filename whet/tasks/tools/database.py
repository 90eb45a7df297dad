"""Questions about an SQLite database, which is queried in SQL."""

import random
import sqlite3
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field

from whet.base.seeds import derive_seed
from whet.core.types import Task
from whet.tasks.cases import Answer
from whet.tasks.math.arithmetic import NAMES
from whet.tasks.scores import CORRECT
from whet.tasks.tools.base import SeededToolTasks, right_or_wrong, says, solution
from whet.tools.tool import ToolError

_TABLES = (
    "CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT, department TEXT, city TEXT, salary INTEGER)",
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, seller INTEGER REFERENCES staff(id), product TEXT, amount INTEGER)",
)
_DEPARTMENTS, _CITIES = ("sales", "design", "support", "research"), ("Oslo", "Lima", "Kyoto", "Accra", "Turin")
_PRODUCTS = ("lamp", "desk", "chair", "shelf", "clock", "carpet")
_QUESTIONS = {
    "How many people work in {department}?": "SELECT COUNT(*) FROM staff WHERE department = '{department}'",
    "How many people in {city} earn over {pay}?": "SELECT COUNT(*) FROM staff WHERE city = '{city}' AND salary > {pay}",
    "Who earns most in {department}?": "SELECT name FROM staff WHERE department = '{department}' ORDER BY salary DESC",
    "What do all in {city} earn together?": "SELECT IFNULL(SUM(salary), 0) FROM staff WHERE city = '{city}'",
    "For how much was {product} sold by people in {city}?": "SELECT IFNULL(SUM(amount), 0) FROM orders JOIN staff "
    "ON staff.id = seller WHERE product = '{product}' AND city = '{city}'",
}
_STEPS, _ROWS, _BYTES = 2_000_000, 20, 100_000  # limits of a query: virtual machine steps, rows shown, bytes of a value
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


@dataclass(frozen=True, slots=True)
class Queried:
    """A query that answers the question."""

    database: int  # its number
    query: str
    answer: str


class Database(SeededToolTasks[Queried]):
    """Who earns most in design? Solved by one query, or several."""

    named_scores = CORRECT

    system: str | None = f"Answer with a query of this SQLite database. {'; '.join(_TABLES)}. Give the answer alone."
    databases: int = Field(default=20, ge=1, le=1000)
    """Number of databases, each with different rows."""
    staff: int = Field(default=60, ge=10, le=10_000)
    """Rows of the table ``staff``. The table ``orders`` has three times this number."""

    def draw(self, rng: random.Random) -> tuple[str, Queried]:
        question, query = rng.choice(list(_QUESTIONS.items()))
        values = {"department": rng.choice(_DEPARTMENTS), "city": rng.choice(_CITIES), "product": rng.choice(_PRODUCTS)}
        values["pay"] = str(rng.randrange(2_000, 9_000, 100))
        query = query.format(**values)
        number = rng.randrange(self.databases)
        answer = self._filled[number].execute(query).fetchone() or ("none",)
        return question.format(**values), Queried(number, query, str(answer[0]))

    @cached_property
    def _filled(self) -> list[sqlite3.Connection]:
        seeds = (derive_seed(self.seed, "database", number) for number in range(self.databases))
        return [self._fill(random.Random(seed)) for seed in seeds]

    def _fill(self, rng: random.Random) -> sqlite3.Connection:
        database = sqlite3.connect(":memory:", check_same_thread=False)
        salaries = rng.sample(range(2_000, 9_000 + self.staff), self.staff)  # all different: one person earns most
        database.executescript(";".join(_TABLES))
        for number, salary in enumerate(salaries):
            person = (number, f"{rng.choice(NAMES)}{number}", rng.choice(_DEPARTMENTS), rng.choice(_CITIES), salary)
            database.execute("INSERT INTO staff VALUES (?, ?, ?, ?, ?)", person)
        for number in range(3 * self.staff):
            order = (number, rng.randrange(self.staff), rng.choice(_PRODUCTS), rng.randrange(10, 900))
            database.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", order)
        database.commit()
        return database

    def state(self, task: Task[Queried]) -> object:
        return Queries(self._filled[task.data.database].serialize())

    def score(self, task: Task[Queried], state: object, answer: str) -> dict[str, float]:
        return right_or_wrong(says(answer, task.data.answer))

    def gold(self, task: Task[Queried]) -> Answer:
        return solution(("query", {"sql": task.data.query}), answer=task.data.answer)


def _allowed(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """Allow reading, without two functions that take seconds for a wide field."""
    return sqlite3.SQLITE_OK if action in _READING and name not in ("printf", "format") else sqlite3.SQLITE_DENY


class Queries:
    """A read-only copy of a database."""

    def __init__(self, content: bytes) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)  # one call at a time
        self._database.deserialize(content)
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _BYTES)
        self._database.set_authorizer(_allowed)

    def query(self, sql: str) -> str:
        """Run one SELECT and return its rows.

        Args:
            sql: The statement
        """
        self._database.set_progress_handler(lambda: 1, _STEPS)
        try:
            rows = self._database.execute(sql).fetchmany(_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, MemoryError) as problem:
            raise ToolError(f"SQLite: {problem}") from None
        shown = "\n".join(" | ".join(map(str, row)) for row in rows[:_ROWS]) or "no rows"
        return f"{shown}\n[more rows]" if len(rows) > _ROWS else shown
