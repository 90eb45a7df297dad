"""A booking desk: a guest asks for changes of bookings, and the bookings at the end decide.

Each guest has one request or more, and the first must be done. Some requests break a rule of the house and must be left
undone, so that neither doing nothing nor doing everything that is asked earns a reward.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from pydantic import Field

from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.core.types import Message, Task
from whet.tasks.cases import Case
from whet.tasks.scores import CORRECT
from whet.tasks.tools.base import right_or_wrong, solution
from whet.tasks.users.base import Fact, Topic, UserTasks
from whet.tasks.users.desk import CLOSED, DAYS, HOURS, MOST_GUESTS, Bookings, Call, Calls, Desk, bookings
from whet.tasks.users.scripted import ScriptedUser
from whet.tools.toolbox import ToolLimits

Part = Literal["day", "hour", "guests"]
Kind = Literal["day", "hour", "guests", "cancel", "book"]
_WORDS = {
    "name": ["name", "who", "whose"],
    "which": ["which booking", "which one", "which of", "currently"],
    "day": ["day", "date", "when"],
    "hour": ["time", "hour", "when"],
    "guests": ["guests", "people", "persons", "how many", "party"],
}
_OPENINGS: dict[Kind, tuple[str, ...]] = {
    "day": ("I would like to move a booking to another day.", "I can't come on the day that I booked."),
    "hour": ("I would like to come at another time.", "Please change the time of a booking."),
    "guests": ("The size of our party has changed.", "The number of guests of a booking is not right any more."),
    "cancel": ("I have to cancel a booking.", "Please cancel a booking of mine."),
    "book": ("I would like to book a table.", "Do you have a table for me?"),
}
_TALK = Message(role="assistant", content="Tell me more.")


@dataclass(frozen=True, slots=True)
class Visit:
    """A guest at a desk."""

    desk: int  # its number
    topics: list[Topic]
    calls: list[Calls]  # the right calls for each topic
    first_said: list[Calls]  # the calls that each topic asks for before its correction, against the rules or not


class BookingDesk(UserTasks[Visit]):
    """Help a guest who wants bookings moved, changed, cancelled or made."""

    named_scores = CORRECT

    system: str | None = (
        "You work at the booking desk of a restaurant and talk to a guest. Do with the tools what the guest asks for, "
        f"and nothing else. Ask for what you need to know. Rules of the house: a table is for at most {MOST_GUESTS} "
        f"guests, and the restaurant is closed on {CLOSED}s. Refuse what breaks a rule, and change nothing for it."
    )
    limits: ToolLimits = ToolLimits(max_calls=40)
    desks: int = Field(default=60, ge=1, le=1000)
    """Number of desks, each with different bookings."""
    names: int = Field(default=20, ge=4, le=120)
    """Names with bookings at a desk. Each has one to three bookings, on different days."""
    requests: int = Field(default=2, ge=1, le=3)
    """Most requests of a guest."""
    forbidden: float = Field(default=0.3, ge=0, le=1)
    """Share of guests with several requests who have one that breaks a rule."""
    corrections: float = Field(default=0.3, ge=0, le=1)
    """Share of changes that the guest corrects after the first reply that follows the last fact."""

    @cached_property
    def _desks(self) -> list[Bookings]:
        return [bookings(random.Random(derive_seed(self.seed, "desk", n)), self.names) for n in range(self.desks)]

    def draw(self, rng: random.Random) -> tuple[str, Visit]:
        number = rng.randrange(self.desks)
        guest = _Guest(rng, self._desks[number], self.corrections)
        count = rng.randint(1, self.requests)
        forbidden = rng.randrange(1, count) if count > 1 and rng.random() < self.forbidden else None
        for request in range(count):
            guest.ask(request == forbidden)
        return guest.topics[0]["say"], Visit(number, guest.topics, guest.calls, guest.first_said)

    def script(self, task: Task[Visit]) -> list[Topic]:
        return task.data.topics

    def state(self, task: Task[Visit]) -> Desk:
        return Desk(self._desks[task.data.desk])

    def score(self, task: Task[Visit], state: Desk, answer: str) -> dict[str, float]:
        expected = self.state(task)
        for calls in task.data.calls:
            expected._make(calls)
        return right_or_wrong(state._content() == expected._content())

    def gold(self, task: Task[Visit]) -> list[Message] | None:
        """Return replies that learn each fact in turn and then make the right calls; None with a model as the user,
        whose messages differ from run to run."""
        return _replies(task, task.data.calls) if isinstance(self.user, ScriptedUser) else None

    def cases(self) -> Sequence[Case]:
        return [*super().cases(), *self._cheats()] if isinstance(self.user, ScriptedUser) else super().cases()

    def _cheats(self) -> Iterator[Case]:
        tasks = self.tasks("train")
        for task in tasks[:4]:
            yield Case("talks until the guest leaves", task, [_TALK] * self.user.max_turns, 0.0, "adversarial")
        breaks_rule = next((task for task in tasks if [] in task.data.calls), None)
        corrected = next((task for task in tasks if any("correction" in topic for topic in task.data.topics)), None)
        for name, chosen in (("does what breaks a rule", breaks_rule), ("ignores a correction", corrected)):
            if chosen is not None:
                yield Case(name, chosen, _replies(chosen, chosen.data.first_said), 0.0, "adversarial")


@dataclass
class _Guest:
    """Draws the requests of a guest of a desk; its lists become a ``Visit``."""

    rng: random.Random
    desk: Bookings
    corrections: float
    topics: list[Topic] = field(default_factory=list)
    calls: list[Calls] = field(default_factory=list)
    first_said: list[Calls] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name: str = self.rng.choice(sorted({row["name"] for row in self.desk.values()}))
        self.codes = [code for code, row in self.desk.items() if row["name"] == self.name]  # not asked about yet
        self.number = len(self.codes)  # of bookings that the guest has
        self.days = [day for day in DAYS if day not in {CLOSED, *(self.desk[code]["day"] for code in self.codes)}]
        self.rng.shuffle(self.codes)
        self.rng.shuffle(self.days)  # days without a booking of the guest, so that a day names one booking

    def ask(self, forbidden: bool) -> None:
        """Add a request. A forbidden one is for a closed day or for too many guests."""
        kinds: list[Kind] = ["book"]
        if self.codes:
            kinds = ["day", "guests"] if forbidden else ["day", "hour", "guests", "cancel", "book"]
        kind = self.rng.choice(kinds)
        topic: Topic = {"say": self.rng.choice(_OPENINGS[kind]), "facts": []}
        if not self.topics:
            topic["facts"].append(_fact("name", f"My name is {self.name}."))
        row: JsonObject = {}
        if kind != "book":
            code = self.codes.pop()
            row = self.desk[code]
            if self.number > 1:
                topic["facts"].append(_fact("which", f"I mean the booking on {row['day']}."))
        if kind == "cancel":
            self.number -= 1
            self._add(topic, ("cancel_booking", {"code": code}), ("cancel_booking", {"code": code}), forbidden)
            return
        values = self._values(row)
        part: Part = self.rng.choice(("day", "guests")) if kind == "book" else kind
        if forbidden:
            values[part] = CLOSED if part == "day" else self.rng.randint(MOST_GUESTS + 1, MOST_GUESTS + 6)
        parts: list[Part] = ["day", "hour", "guests"] if kind == "book" else [part]
        topic["facts"] += [_fact(each, _wish(each, values[each])) for each in parts]
        first = {each: values[each] for each in parts}
        right = dict(first)
        another = part != "day" or len(self.days) > 1
        if not forbidden and another and self.rng.random() < self.corrections:
            while right[part] in (first[part], row.get(part)):
                right[part] = self._values(row)[part]
            topic["correction"] = _fact(part, f"Sorry, I was wrong. {_wish(part, right[part])}")
        if "day" in parts and not forbidden:
            self.days.remove(right["day"])
        self.number += kind == "book" and not forbidden
        tool = "book_table" if kind == "book" else "change_booking"
        which = {"name": self.name} if kind == "book" else {"code": code}
        self._add(topic, (tool, which | first), (tool, which | right), forbidden)

    def _values(self, row: dict[str, object]) -> JsonObject:
        """Return a new day, hour and number of guests, none of which the row has."""
        hours = [hour for hour in HOURS if hour != row.get("hour")]
        guests = [number for number in range(2, MOST_GUESTS + 1) if number != row.get("guests")]
        return {"day": self.rng.choice(self.days), "hour": self.rng.choice(hours), "guests": self.rng.choice(guests)}

    def _add(self, topic: Topic, first: Call, right: Call, forbidden: bool) -> None:
        self.topics.append(topic)
        self.first_said.append([first])
        self.calls.append([] if forbidden else [right])


def _replies(task: Task[Visit], calls: Sequence[Calls]) -> list[Message]:
    """Return replies that hear each topic's facts and its correction before they make the calls for it."""
    replies = list[Message]()
    for topic, made in zip(task.data.topics, calls, strict=True):
        replies += [_TALK] * (len(topic["facts"]) + ("correction" in topic))
        replies += solution(*made, answer="Done.")
    return replies


def _fact(part: str, text: str) -> Fact:
    return {"words": _WORDS[part], "text": text}


def _wish(part: Part, value: object) -> str:
    return {"day": f"On {value}, please.", "hour": f"At {value}:00, please.", "guests": f"We are {value}."}[part]
