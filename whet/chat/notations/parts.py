"""The parts of a reply, and helpers that all notations of calls share."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.chat.calls import checked_call
from whet.core.types import ToolCall

Tools = Sequence[Mapping[str, Any]]
Block = Callable[[str, int, str, Tools | None], tuple[Any, int]]
"""Reads the calls after an opening mark: takes the text, the position, the closing mark (or an empty text) and the
tools; returns a call or a list of calls, and the position after the closing mark. Raises ``ValueError`` for text that
can't be parsed."""

MOST = 128  # most calls of a reply
SPACE = re.compile(r"\s*")


@dataclass(slots=True)
class Parts:
    """The parts of a reply."""

    text: str = ""  # without the calls
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of texts that look like calls but can't be parsed

    def add(self, value: object) -> None:
        """Add the calls in a JSON value, a call or a list. Raises ``ValueError`` without adding any if one is
        invalid."""
        values = value if isinstance(value, list) else [value]
        self.calls += [checked_call(call, len(self.calls) + number) for number, call in enumerate(values)]


def skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the position after what the pattern matches at ``at``."""
    match = pattern.match(text, at)
    return match.end() if match else at


def closed(text: str, at: int, mark: str, problem: str = "its end is not marked") -> int:
    """Return the position after a closing mark, which may be missing at the end of the text. Raises ``ValueError`` with
    the problem if there is other text."""
    at = skip(SPACE, text, at)
    if at < len(text) and not text.startswith(mark, at):
        raise ValueError(problem)
    return min(len(text), at + len(mark))


def ended(text: str, at: int, mark: str) -> int:
    """Return the position after a closing mark. Raises ``ValueError`` if it is missing, also at the end of the text."""
    at = skip(SPACE, text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"its arguments are not in closed tags, or {mark} is missing")
    return at + len(mark)
