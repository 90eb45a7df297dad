"""Long context: facts scattered in a text of any length, made up from a seed, or rows of the same form.

Needles and variables as in RULER (arXiv 2404.06654), walks in a graph as in OpenAI's graphwalks.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from whet.core.content import text_of
from whet.core.types import Task
from whet.data.row import read_rows
from whet.tasks.cases import Kind
from whet.tasks.gym.training_rows import GymRow
from whet.tasks.task_source import SourcedTasks

_NAMES = (
    "Aster Birch Cedar Dahlia Elder Fern Ginkgo Hazel Iris Jasmine Kelp Laurel Maple Nettle Olive Poppy Quince Rose "
    "Tulip Umber Violet Willow Yarrow Zinnia Alder Basil Clover Daisy Fennel Heather Juniper Lilac Mallow Orchid Pine"
)
NAMES = _NAMES.split()
FILLER = (
    ("The", "An old", "Every", "Another", "No"),
    ("gardener", "train", "letter", "bridge", "neighbour", "orchestra", "ferry", "clerk", "market", "kettle"),
    ("waited near", "turned towards", "was seen behind", "had nothing to do with", "stayed in"),
    ("the harbour", "the library", "a quiet street", "the station", "the hills", "a small museum"),
    ("all morning", "in the rain", "without a word", "before dinner", "as usual", "until late"),
)
Name = Literal["needle", "needles", "variables", "graph"]
Posed = tuple[list[str], str, list[str]]  # facts in order, the question, what is asked for
_LAST_LINE = re.compile(r"[*_`\s]*final answer:[*_`\s]*\[(.*)\][*_`.\s]*", re.IGNORECASE)
_COPIED = 8  # words in a row that are a copy


def _needles(rng: random.Random, count: int) -> Posed:
    keys, numbers = rng.sample(NAMES, count + 3), rng.sample(range(100, 1000), count + 3)
    facts = [f"The number of {key} is {number}." for key, number in zip(keys, numbers, strict=True)]
    asked = " and ".join(f"the number of {key}" for key in keys[:count])
    return rng.sample(facts, len(facts)), f"What is {asked}?", [str(number) for number in numbers[:count]]


def _variables(rng: random.Random, count: int) -> Posed:
    names, (wanted, other) = rng.sample(NAMES, 2 * count), rng.sample(range(100, 1000), 2)
    chains, facts = [(names[:count], wanted), (names[count:], other)], list[str]()
    for link in range(count):
        for chain, value in rng.sample(chains, 2):
            facts.append(f"{chain[link]} is set to {chain[link - 1] if link else value}.")
    return facts, f"Which names have the value {wanted} in the end?", names[:count]


def _graph(rng: random.Random, count: int) -> Posed:
    nodes = rng.sample(NAMES, count + 4)
    edges = sorted({tuple(rng.sample(nodes, 2)) for _ in range(2 * len(nodes))}, key=lambda _: rng.random())
    facts = [f"{one} leads to {other}." for one, other in edges]
    node = edges[0][1]
    if rng.random() < 0.5:
        return facts, f"Which places lead to {node} directly?", [one for one, other in edges if other == node]
    node = edges[0][0]
    near = {other for one, other in edges if one == node}
    far = sorted({other for one, other in edges if one in near} - near - {node})
    if not far:
        return facts, f"To which places does {node} lead directly?", sorted(near)
    return facts, f"Which places are exactly two steps away from {node}, and not fewer?", far


KINDS: dict[Name, Callable[[random.Random, int], Posed]] = {
    "needle": lambda rng, _: _needles(rng, 1),
    "needles": _needles,
    "variables": _variables,
    "graph": _graph,
}


def _listed(value: Any) -> Any:
    """A list may come as JSON, its items as numbers."""
    value = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    value = value if isinstance(value, list) else [value]
    return [str(item) if isinstance(item, int) else item for item in value]


class Asked(GymRow):
    """A row: what the model is shown, context and all, and the items of the answer."""

    answer: Annotated[list[str], BeforeValidator(_listed)] = Field(
        validation_alias=AliasChoices("answer", "expected_answer", "answer_nodes", "outputs")
    )


class LongContext(SourcedTasks):
    """Questions about facts in a long text, whose last line answers ``Final Answer: [one, another]``."""

    name: ClassVar[str] = "long_context"
    variety: ClassVar[str] = "items"

    kinds: tuple[Name, ...] = Field(default=("needle", "needles", "variables", "graph"), min_length=1)
    """One number among several; some of them; variables set to each other; walks in a graph."""
    words: int = Field(default=120, ge=1, le=10_000_000)
    """Length of the text, about. A word is 1.3 tokens, or so."""
    items: int = Field(default=2, ge=1, le=15)
    """How many are asked for; of a graph, four nodes fewer than it has."""
    score: Literal["f1", "exact"] = "f1"
    """What is paid: the F1 of the items, or 1 for all of them, else 0. More items than there are earn nothing."""
    max_copied: float = Field(default=0.25, ge=0, le=1)
    """An answer that copies more of the text than this, and 40 words, earns nothing."""

    def read(self, path: str) -> list[Task]:
        rows = read_rows(path, Asked, self.columns)
        return [Task("", row.shown(self.system), {"answer": row.answer}) for row in rows]

    def draw(self, rng: random.Random) -> Task:
        facts, question, answer = KINDS[rng.choice(self.kinds)](rng, self.items)
        missing = self.words - sum(len(fact.split()) for fact in facts)
        fillers = list[str]()
        while missing > 0:
            fillers.append(" ".join(rng.choice(part) for part in FILLER) + ".")
            missing -= len(fillers[-1].split())
        order = iter(facts)
        places = set(rng.sample(range(len(facts) + len(fillers)), len(facts)))
        text = " ".join(next(order) if place in places else fillers.pop() for place in range(len(facts) + len(fillers)))
        told = "End with a line of this form, with the items in brackets: Final Answer: [first, second]"
        return Task("", self.ask(f"{text}\n\n{question}\n{told}"), {"answer": answer})

    def gold(self, task: Task) -> str:
        return f"Final Answer: [{', '.join(task.data['answer'])}]"

    def answers(self, task: Task) -> Iterator[tuple[Kind, str, str, float]]:
        gold, text = self.gold(task), text_of(task.prompt[-1]["content"])
        every = ", ".join(sorted(set(re.findall(r"\w+", text)), key=lambda word: word not in task.data["answer"]))
        yield "good", "the items", gold, 1.0
        yield "good", "after a thought", f"Let me see.\n{gold}", 1.0
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "not in the last line", f"{gold}\nI am sure.", 0.0
        yield "bad", "another item", "Final Answer: [zzz]", 0.0
        yield "adversarial", "every word of the text", f"Final Answer: [{every}]", 0.0
        yield "adversarial", "the form as it was asked for", "Final Answer: [first, second]", 0.0
        if len(text.split()) > 60:
            yield "adversarial", "the whole text first", f"{text}\n{gold}", 0.0

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        *before, last = answer.strip().split("\n")
        match = _LAST_LINE.fullmatch(last[:100_000])
        if match is None:
            return {"reward": 0.0, "correct": 0.0, "format": 0.0}
        items = [item.strip().strip("\"'*`").casefold() for item in match[1].split(",") if item.strip()]
        given, known = set(items), {item.strip().casefold() for item in task.data["answer"]}
        hits = len(given & known)
        f1 = 2 * hits / (len(given) + len(known)) if given or known else 1.0
        copied = self._copied("\n".join(before), task)
        paid = len(items) <= len(known) and not copied
        correct = float(f1 == 1 and paid)
        reward = correct if self.score == "exact" else f1 * paid
        return {"reward": float(reward), "correct": correct, "format": 1.0, "copied": float(copied)}

    def _copied(self, before: str, task: Task) -> bool:
        """Whether the answer repeats more of the text than it may."""
        text, words = (_words(message) for message in (text_of(task.prompt[-1]["content"]), before))
        if len(words) <= 40:
            return False
        known = {tuple(text[start : start + _COPIED]) for start in range(len(text) - _COPIED + 1)}
        runs = [start for start in range(len(words) - _COPIED + 1) if tuple(words[start : start + _COPIED]) in known]
        places = {place for start in runs for place in range(start, start + _COPIED)}
        return len(places) > max(40, self.max_copied * len(text))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
