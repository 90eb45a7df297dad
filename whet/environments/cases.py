"""Answers whose reward is known, by which a grader is checked before anything is trained on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from whet.types import Message, Task

Kind = Literal["good", "bad", "boundary", "adversarial"]
Answer = str | Sequence[Message]  # the reply, or the replies of several turns in order


@dataclass(frozen=True, slots=True)
class Case:
    """One answer to one task, and what it must be worth."""

    name: str  # what it tries, in a few words
    task: Task
    answer: Answer
    expected: float  # the reward of the episode
    kind: Kind
