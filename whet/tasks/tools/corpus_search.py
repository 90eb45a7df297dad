"""Search in a corpus (BM25): questions whose answers are in one or two of many texts."""

import random
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field

from whet.base.extras import require
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.core.types import Task
from whet.tasks.base import Environments
from whet.tasks.cases import Answer
from whet.tasks.math.arithmetic import NAMES
from whet.tasks.scores import CORRECT
from whet.tasks.tools.base import SeededToolTasks, right_or_wrong, says, solution

_SYLLABLES = ("ba", "dor", "el", "fin", "gra", "hul", "ka", "lor", "mi", "nau", "or", "pe", "ri", "sol", "tu", "ve")
_RIVERS, _GOODS = ("Ard", "Belo", "Corin", "Dwell", "Esk"), ("salt", "glass", "wool", "copper", "paper", "honey")
_ASKED = {"year": "In which year was {} founded?", "river": "On which river is {}?", "goods": "What is {} known for?"}
_TEXT = "{name} is a town on the river {river}. It was founded in {year} and is known for its {goods}."
_SHOWN = 3  # most results of a search


@dataclass(frozen=True, slots=True)
class Found:
    """An answer in the corpus."""

    searches: list[str]  # the queries that lead to it, in order
    answer: str


class CorpusSearch(SeededToolTasks[Found]):
    """In which year was the town founded where Kalor Vemi was born? Needs one search, or two in sequence."""

    named_scores = CORRECT

    system: str | None = "Search, then give the answer alone."
    towns: int = Field(default=1000, ge=5, le=2000)
    """Number of texts about towns, and of texts about people."""

    def draw(self, rng: random.Random) -> tuple[str, Found]:
        person = rng.choice(self._people)
        town = self._towns[person["town"]]
        what = rng.choice(list(_ASKED))
        searches, name = [town["name"]], town["name"]
        if rng.random() < 0.5:
            searches, name = [person["name"], town["name"]], f"the town where {person['name']} was born"
        return _ASKED[what].format(name), Found(searches, town[what])

    @cached_property
    def _towns(self) -> list[dict[str, str]]:
        rng = random.Random(derive_seed(self.seed, "towns"))
        return [
            {
                "name": name,
                "year": str(rng.randint(1100, 1950)),
                "river": rng.choice(_RIVERS),
                "goods": rng.choice(_GOODS),
            }
            for name in _names(rng, self.towns, 3)
        ]

    @cached_property
    def _people(self) -> list[JsonObject]:
        rng = random.Random(derive_seed(self.seed, "people"))
        firsts, lasts = rng.choices(NAMES, k=self.towns), _names(rng, self.towns, 3)
        return [
            {"name": f"{first} {last}", "town": rng.randrange(self.towns)}
            for first, last in zip(firsts, lasts, strict=True)
        ]

    @cached_property
    def _index(self) -> "Index":
        texts = [_TEXT.format(**town) for town in self._towns]
        texts += [f"{person['name']} was born in {self._towns[person['town']]['name']}." for person in self._people]
        return Index(texts)

    def open(self) -> Environments:
        require("tools", "data.type=corpus_search", "bm25s")
        return super().open()

    def state(self, task: Task[Found]) -> object:
        return self._index.search

    def score(self, task: Task[Found], state: object, answer: str) -> dict[str, float]:
        return right_or_wrong(says(answer, task.data.answer))

    def gold(self, task: Task[Found]) -> Answer:
        searches = (("search", {"query": query}) for query in task.data.searches)
        return solution(*searches, answer=task.data.answer)


class Index:
    """Texts that can be searched."""

    def __init__(self, texts: list[str]) -> None:
        import bm25s

        self._texts, self._bm25s, self._index = texts, bm25s, bm25s.BM25()
        self._index.index(self._words(texts), show_progress=False)

    def search(self, query: str) -> list[str]:
        """Return the texts that fit a query best.

        Args:
            query: A few words
        """
        count = min(_SHOWN, len(self._texts))
        numbers, scores = self._index.retrieve(self._words([query]), k=count, show_progress=False)
        return [self._texts[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]

    def _words(self, texts: list[str]) -> object:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False)


def _names(rng: random.Random, count: int, syllables: int) -> list[str]:
    """Return ``count`` different names."""
    names = dict[str, None]()
    while len(names) < count:
        names["".join(rng.choices(_SYLLABLES, k=syllables)).capitalize()] = None
    return list(names)
