"""The bookings of a restaurant's desk, and the tools that read and change them."""

import random
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Literal, get_args

from whet.tools.tool import ToolError

Day = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
Bookings = dict[str, dict[str, Any]]  # code -> name, day, hour and number of guests
Call = tuple[str, dict[str, Any]]  # the name of a tool, and its arguments
Calls = list[Call]
DAYS: tuple[Day, ...] = get_args(Day)
CLOSED: Day = "Monday"
MOST_GUESTS, HOURS = 8, range(17, 22)
_FIRST = (
    "Aisha",
    "Carlos",
    "Dmitri",
    "Elena",
    "Fatima",
    "George",
    "Hanna",
    "Ivan",
    "Jun",
    "Kofi",
    "Lena",
    "Marco",
    "Nia",
)
_LAST = ("Adler", "Brandt", "Chen", "Diaz", "Evans", "Fischer", "Garcia", "Holm", "Ito", "Jansen")


class Desk:
    """The bookings of a desk."""

    def __init__(self, rows: Bookings) -> None:
        self._rows = {code: dict(row) for code, row in rows.items()}
        self._new = count(1)  # a code is never used again, also after a cancellation

    def find_bookings(self, name: str) -> list[dict[str, object]]:
        """List the bookings of a guest, with their codes.

        Args:
            name: First and last name of the guest
        """
        plain = _plain(name)
        return [{"code": code, **row} for code, row in self._rows.items() if _plain(row["name"]) == plain]

    def book_table(self, name: str, day: Day, hour: int, guests: int) -> str:
        """Make a booking. Returns its code.

        Args:
            name: First and last name of the guest
            day: The day
            hour: The full hour, 17 to 21
            guests: Number of guests
        """
        code = f"N{next(self._new)}"
        self._rows[code] = {"name": name, "day": day, "hour": _hour(hour), "guests": guests}
        return code

    def change_booking(
        self, code: str, day: Day | None = None, hour: int | None = None, guests: int | None = None
    ) -> str:
        """Change a booking. What isn't given stays as it is.

        Args:
            code: The code of the booking
            day: The new day
            hour: The new full hour, 17 to 21
            guests: The new number of guests
        """
        changes = {"day": day, "hour": hour if hour is None else _hour(hour), "guests": guests}
        self._row(code).update({name: value for name, value in changes.items() if value is not None})
        return "changed"

    def cancel_booking(self, code: str) -> str:
        """Cancel a booking.

        Args:
            code: The code of the booking
        """
        self._row(code)
        del self._rows[code]
        return "cancelled"

    def _row(self, code: str) -> dict[str, object]:
        if code not in self._rows:
            raise ToolError(f"there is no booking with the code {code!r}; find_bookings lists them")
        return self._rows[code]

    def _content(self) -> list[tuple[str, ...]]:
        """Return the bookings without their codes, in an order that doesn't depend on that of the calls."""
        rows = self._rows.values()
        return sorted((_plain(row["name"]), row["day"], str(row["hour"]), str(row["guests"])) for row in rows)

    def _make(self, calls: Iterable[Call]) -> None:
        tools: dict[str, Callable[..., str]] = {
            "book_table": self.book_table,
            "cancel_booking": self.cancel_booking,
            "change_booking": self.change_booking,
        }
        for tool, arguments in calls:
            tools[tool](**arguments)


def bookings(rng: random.Random, count: int) -> Bookings:
    """Return the bookings of a desk under ``count`` names, by their codes. A name's bookings are on different days."""
    rows: Bookings = {}
    names = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], count)
    codes = iter(rng.sample(range(1000, 10_000), 3 * count))
    for name in names:
        for day in rng.sample(DAYS[1:], rng.randint(1, 3)):
            row = {"name": name, "day": day, "hour": rng.choice(HOURS), "guests": rng.randint(1, MOST_GUESTS)}
            rows[f"B{next(codes)}"] = row
    return rows


def _hour(hour: int) -> int:
    if hour not in HOURS:
        raise ToolError(f"tables are booked for a full hour from {HOURS[0]} to {HOURS[-1]}, not {hour}")
    return hour


def _plain(name: str) -> str:
    return " ".join(name.split()).casefold()
