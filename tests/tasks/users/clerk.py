"""A policy by rules for the booking desk. It knows what the conversation says, and nothing else."""

import json
import re
from typing import Any

from whet.core.types import Message
from whet.tasks.tools.base import solution
from whet.tasks.users.desk import CLOSED, MOST_GUESTS

KINDS = (("cancel", "cancel"), ("table", "book"), ("party", "guests"), ("guests", "guests"), ("time", "hour"))
FACTS = {
    "name": r"My name is ([\w ]+)\.",
    "which": r"I mean the booking on (\w+)",
    "day": r"On (\w+), please",
    "hour": r"At (\d+):00",
    "guests": r"We are (\d+)",
}
QUESTIONS = {
    "name": "What is your name?",
    "which": "Which booking do you mean?",
    "day": "On which day?",
    "hour": "At what time?",
    "guests": "For how many people?",
}


class Clerk:
    """Asks for what is missing, looks bookings up, acts, and says that it has."""

    def __init__(self) -> None:
        self.name = self.kind = self.code = ""
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] | None = None

    def reply(self, last: Message) -> Message:
        text = str(last["content"])
        if last["role"] == "tool" and last["name"] == "find_bookings":
            self.rows = json.loads(text)
        elif last["role"] == "tool":
            self.code = self.code or text  # of a booking that was made
            return say("Done.")
        else:
            self.hear(text)
        return self.act()

    def hear(self, text: str) -> None:
        news = {part: match[1] for part, pattern in FACTS.items() if (match := re.search(pattern, text))}
        if not news:
            self.kind, self.code, self.facts, self.rows = kind_of(text), "", {}, None
        self.name = news.pop("name", self.name)
        self.facts |= {part: int(value) if value.isdigit() else value for part, value in news.items()}

    def act(self) -> Message:
        if not self.name:
            return say(QUESTIONS["name"])
        if self.kind != "book" and not self.code:
            if self.rows is None:
                return call("find_bookings", name=self.name)
            rows = [row for row in self.rows if self.facts.get("which", row["day"]) == row["day"]]
            if len(rows) > 1:
                return say(QUESTIONS["which"])
            self.code = rows[0]["code"]
        parts = {"book": ["day", "hour", "guests"], "cancel": []}.get(self.kind, [self.kind])
        for part in parts:
            if part not in self.facts:
                return say(QUESTIONS[part])
        values = {part: self.facts[part] for part in parts}
        if values.get("day") == CLOSED or values.get("guests", 0) > MOST_GUESTS:
            return say("That is against the rules of the house.")
        if self.kind == "cancel":
            return call("cancel_booking", code=self.code)
        if self.code:
            return call("change_booking", code=self.code, **values)
        return call("book_table", name=self.name, **values)


def kind_of(text: str) -> str:
    return next((kind for word, kind in KINDS if word in text), "day")


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(tool: str, **arguments: Any) -> Message:
    return solution((tool, arguments), answer="")[0]
