"""Long context: questions about facts scattered in a long text, generated from a seed or read from rows.

Needles and variables as in RULER (arXiv 2404.06654), walks in a graph as in OpenAI's graphwalks, and questions over
several documents (``documents.py``).
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from whet.core.content import text_of
from whet.core.types import Task
from whet.data.row import read_rows
from whet.tasks.cases import Kind
from whet.tasks.documents import KINDS as DOCUMENT_KINDS
from whet.tasks.documents import MOST_DOCUMENTS, DocumentKind, guesses
from whet.tasks.gym.rows import GymRow
from whet.tasks.scores import FORMAT, NamedScore
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
Name = Literal["needle", "needles", "variables", "graph"] | DocumentKind
Posed = tuple[list[str], str, list[str]]  # facts in order, question, items of the answer
_LAST_LINE = re.compile(r"[*_`\s]*final answer:[*_`\s]*\[(.*)\][*_`.\s]*", re.IGNORECASE)
_COPIED = 8  # consecutive words that count as a copy


def _needles(rng: random.Random, count: int) -> Posed:
    keys, numbers = rng.sample(NAMES, count + 3), rng.sample(range(100, 1000), count + 3)
    facts = [f"The number of {key} is {number}." for key, number in zip(keys, numbers, strict=True)]
    asked = " and ".join(f"the number of {key}" for key in keys[:count])
    return rng.sample(facts, len(facts)), f"What is {asked}?", [str(number) for number in numbers[:count]]


def _variables(rng: random.Random, count: int) -> Posed:
    names, (value, other) = rng.sample(NAMES, 2 * count), rng.sample(range(100, 1000), 2)
    chains, facts = [(names[:count], value), (names[count:], other)], list[str]()
    for link in range(count):
        for chain, first in rng.sample(chains, 2):
            facts.append(f"{chain[link]} is set to {chain[link - 1] if link else first}.")
    return facts, f"Which names have the value {value} in the end?", names[:count]


def _graph(rng: random.Random, count: int) -> Posed:
    nodes = rng.sample(NAMES, count + 4)
    drawn = sorted({tuple(rng.sample(nodes, 2)) for _ in range(2 * len(nodes))})  # the order of a set varies
    edges = rng.sample(drawn, len(drawn))
    facts = [f"{start} leads to {end}." for start, end in edges]
    node = edges[0][1]
    if rng.random() < 0.5:
        return facts, f"Which places lead to {node} directly?", [start for start, end in edges if end == node]
    node = edges[0][0]
    near = {end for start, end in edges if start == node}
    far = sorted({end for start, end in edges if start in near} - near - {node})
    if not far:
        return facts, f"To which places does {node} lead directly?", sorted(near)
    return facts, f"Which places are exactly two steps away from {node}, and not fewer?", far


KINDS: dict[Name, Callable[[random.Random, int], Posed]] = {
    "needle": lambda rng, _: _needles(rng, 1),
    "needles": _needles,
    "variables": _variables,
    "graph": _graph,
}


def _listed(value: object) -> object:
    """Return the items as a list of texts. The row may have a list, JSON of one, or one item; items may be numbers."""
    value = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    value = value if isinstance(value, list) else [value]
    return [str(item) if isinstance(item, int) else item for item in value]


class LongContextRow(GymRow):
    """A row: the prompt, which contains the long text, and the items of the answer."""

    answer: Annotated[list[str], BeforeValidator(_listed)] = Field(
        validation_alias=AliasChoices("answer", "expected_answer", "answer_nodes", "outputs")
    )


@dataclass(frozen=True, slots=True)
class Items:
    """The items of the right answer."""

    answer: list[str]


class LongContext(SourcedTasks[Items]):
    """Questions about facts in a long text. The last line of an answer is ``Final Answer: [first, second]``."""

    named_scores = FORMAT | {"copied": NamedScore()}

    name: ClassVar[str] = "long_context"
    variety: ClassVar[str] = "items"

    kinds: tuple[Name, ...] = Field(default=("needle", "needles", "variables", "graph"), min_length=1)
    """The kinds of questions: for one number, for several numbers, for variables set to each other, for walks in a
    graph; and over documents, for a chain, a comparison or a count."""
    words: int = Field(default=120, ge=1, le=10_000_000)
    """Approximate length of the text. A word is about 1.3 tokens."""
    items: int = Field(default=2, ge=1, le=15)
    """Items of an answer; a graph has four nodes more. Over documents: steps of a chain; a comparison has two towns
    more."""
    documents: int = Field(default=10, ge=4, le=MOST_DOCUMENTS)
    """Documents of a text, for the kinds over documents."""
    score: Literal["f1", "exact"] = "f1"
    """The reward: the F1 score of the items, or 1 if all are right, else 0. Too many items earn nothing."""
    max_copied: float = Field(default=0.25, ge=0, le=1)
    """An answer earns nothing if it copies more than this share of the text and more than 40 words."""

    def read(self, path: str) -> list[Task[Items]]:
        rows = read_rows(path, LongContextRow, self.columns)
        return [Task("", row.shown(self.system), Items(row.answer)) for row in rows]

    def draw(self, rng: random.Random) -> Task[Items]:
        kind = rng.choice(self.kinds)
        if kind in DOCUMENT_KINDS:
            text, question, answer = self._over_documents(rng, kind)
        else:
            facts, question, answer = KINDS[kind](rng, self.items)
            text = _scattered(rng, facts, self.words)
        form = "End with a line of this form, with the items in brackets: Final Answer: [first, second]"
        return Task("", self.ask(f"{text}\n\n{question}\n{form}"), Items(answer))

    def _over_documents(self, rng: random.Random, kind: DocumentKind) -> tuple[str, str, list[str]]:
        towns, question, answer = DOCUMENT_KINDS[kind](rng, self.items, self.documents)
        documents = [
            f"Document {number}: {town.name}\n"
            + _scattered(rng, rng.sample(town.facts, len(town.facts)), self.words // self.documents)
            for number, town in enumerate(towns, 1)
        ]
        return "\n\n".join(documents), question, [answer]

    def gold(self, task: Task[Items]) -> str:
        return f"Final Answer: [{', '.join(task.data.answer)}]"

    def answers(self, task: Task[Items]) -> Iterator[tuple[Kind, str, str, float]]:
        gold, text = self.gold(task), text_of(task.prompt[-1]["content"])
        every = ", ".join(sorted(set(re.findall(r"\w+", text)), key=lambda word: word not in task.data.answer))
        yield "good", "the items", gold, 1.0
        yield "good", "after a thought", f"Let me see.\n{gold}", 1.0
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "not in the last line", f"{gold}\nI am sure.", 0.0
        yield "bad", "another item", "Final Answer: [zzz]", 0.0
        yield "adversarial", "every word of the text", f"Final Answer: [{every}]", 0.0
        yield "adversarial", "the form as it was asked for", "Final Answer: [first, second]", 0.0
        for name, guess in guesses(text).items():
            if [guess] != task.data.answer:
                yield "adversarial", name, f"Final Answer: [{guess}]", 0.0
        if len(text.split()) > 60:
            yield "adversarial", "the whole text first", f"{text}\n{gold}", 0.0

    async def grade(self, task: Task[Items], answer: str) -> dict[str, float]:
        *before, last = answer.strip().split("\n")
        match = _LAST_LINE.fullmatch(last[:100_000])
        if match is None:
            return {"reward": 0.0, "correct": 0.0, "format": 0.0}
        items, right = _items(match[1]), set(_items(",".join(task.data.answer)))
        given = set(items)
        hits = len(given & right)
        f1 = 2 * hits / (len(given) + len(right)) if given or right else 1.0
        copied = self._copied("\n".join(before), task)
        acceptable = len(items) <= len(right) and not copied
        correct = float(f1 == 1 and acceptable)
        reward = correct if self.score == "exact" else f1 * acceptable
        return {"reward": float(reward), "correct": correct, "format": 1.0, "copied": float(copied)}

    def _copied(self, before: str, task: Task[Items]) -> bool:
        """Return whether the part of the answer before its last line copies too much of the text."""
        text, words = (_words(message) for message in (text_of(task.prompt[-1]["content"]), before))
        if len(words) <= 40:
            return False
        in_text = {tuple(text[start : start + _COPIED]) for start in range(len(text) - _COPIED + 1)}
        runs = [start for start in range(len(words) - _COPIED + 1) if tuple(words[start : start + _COPIED]) in in_text]
        places = {place for start in runs for place in range(start, start + _COPIED)}
        return len(places) > max(40, self.max_copied * len(text))


def _scattered(rng: random.Random, facts: Sequence[str], words: int) -> str:
    """Return a text of about this number of words, with the facts in their order between other sentences."""
    missing = words - sum(len(fact.split()) for fact in facts)
    fillers = list[str]()
    while missing > 0:
        fillers.append(" ".join(rng.choice(part) for part in FILLER) + ".")
        missing -= len(fillers[-1].split())
    order = iter(facts)
    places = set(rng.sample(range(len(facts) + len(fillers)), len(facts)))
    return " ".join(next(order) if place in places else fillers.pop() for place in range(len(facts) + len(fillers)))


def _items(text: str) -> list[str]:
    """Return the items between commas. An item of a right answer that has a comma counts as two items."""
    return [item.strip().strip("\"'*`").casefold() for item in text.split(",") if item.strip()]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
