"""Cases: answers with known rewards, which check a grader before a policy is trained on it."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from whet.core.content import text_of, words_of
from whet.core.types import Message, Task

Kind = Literal["good", "bad", "boundary", "adversarial"]
Answer = str | Sequence[Message]  # the reply, or the replies of several turns in order


@dataclass(frozen=True, slots=True)
class Case:
    """An answer to a task, with its expected reward."""

    name: str  # a short description
    task: Task
    answer: Answer
    expected: float  # the reward of the episode
    kind: Kind


CONSTANTS = ("0", "1", "42", "yes", "I don't know.")
_EXPRESSION = re.compile(r"\$([^$\n]{2,200})\$|(?<![\w.])(\(*-?[0-9.]+\)*(?: ?[-+*/^] ?\(*-?[0-9.]+\)*)+)")


def question_of(task: Task) -> str:
    """Return the text of the last user message of a task; empty without one."""
    users = (message for message in reversed(task.prompt) if message["role"] == "user")
    return next((words_of(message["content"]) for message in users), "")


def unearned(
    task: Task, gold: Answer | None, others: Sequence[Answer] = (), form: Callable[[str], str] = str
) -> Iterator[Case]:
    """Yield answers that take no work and must earn nothing: the question again, its expressions, constants, and right
    answers to other tasks. Texts that are part of the gold answer are left out. ``form`` makes a reply of a text."""
    question = question_of(task)
    gold_text = gold if isinstance(gold, str) else " ".join(text_of(message["content"]) for message in gold or ())
    formulas = dict.fromkeys(match[1] or match[2] for match in _EXPRESSION.finditer(question))
    expressions = [text for text in formulas if "=" not in text and re.search(r"[-+*/^\\]", text[1:])]
    texts = [("the question again", question)]
    texts += [("an expression of the question", text) for text in expressions[:4]]
    texts += [("a constant", text) for text in CONSTANTS]
    for name, text in texts:
        if text.strip() and text not in gold_text:
            yield Case(name, task, form(text), 0.0, "adversarial")
    for other in others:
        if other != gold:
            yield Case("another task's answer", task, other, 0.0, "adversarial")
