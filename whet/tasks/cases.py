"""Answers whose reward is known, by which a grader is checked before anything is trained on it."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from whet.core.content import text_of
from whet.core.types import Message, Task

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


CONSTANTS = ("0", "1", "42", "yes", "I don't know.")
_EXPRESSION = re.compile(r"\$([^$\n]{2,200})\$|(?<![\w.])(\(*-?[0-9.]+\)*(?: ?[-+*/^] ?\(*-?[0-9.]+\)*)+)")


def unearned(
    task: Task, gold: Answer | None, others: Sequence[Answer] = (), form: Callable[[str], str] = str
) -> Iterator[Case]:
    """Yield answers that take no work and must earn nothing: the question again, its expressions, constants, and right
    answers to other tasks. What the right answer holds anyway is left out. ``form`` makes a reply of a text."""
    question = next((text_of(said["content"]) for said in reversed(task.prompt) if said["role"] == "user"), "")
    known = gold if isinstance(gold, str) else " ".join(text_of(said["content"]) for said in gold or ())
    found = dict.fromkeys(match[1] or match[2] for match in _EXPRESSION.finditer(question))
    expressions = [text for text in found if "=" not in text and re.search(r"[-+*/^\\]", text[1:])]
    tried = [("the question again", question)]
    tried += [("an expression of the question", text) for text in expressions[:4]]
    tried += [("a constant", text) for text in CONSTANTS]
    for name, text in tried:
        if text.strip() and text not in known:
            yield Case(name, task, form(text), 0.0, "adversarial")
    for other in others:
        if other != gold:
            yield Case("another task's answer", task, other, 0.0, "adversarial")
