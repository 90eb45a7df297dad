"""Questions over several documents for ``long_context``: chains, comparisons and counts, whose answers need facts of
several documents among others of the same form.

Each document is about one town and states its river, founding year, twin town and mayor between other sentences. Each
mayor occurs once, and each town is the twin of exactly one other town, so that neither the most frequent name, nor the
first document, nor the form of a document gives the answer away.
"""

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

_HEADS = (
    "Al Bar Cor Dun El Far Gal Hor Il Jas Kel Lor Mar Nor Os Per Quil Ras Sel Tor Ul Ver Wen Yar Zel Bri Cal Dra Fen"
)
_MIDDLES = "a be co di e fa go hi ko la mo na o pe ra so ti u ve zo"
_ENDS = "burg dale ford gate ham mere port stead ton wick"
_FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon", "Kai", "Lea", "Max", "Ned", "Ola")
_RIVERS = ("Tarn", "Ouse", "Lune", "Wye")
_YEARS = range(1200, 1900)
MOST_DOCUMENTS = 600  # their towns have different years
DocumentKind = Literal["chain", "comparison", "count"]


@dataclass(frozen=True, slots=True)
class Town:
    """The facts of one document."""

    name: str
    river: str
    founded: int
    twin: str
    mayor: str

    @property
    def facts(self) -> list[str]:
        """Return the sentences that state the facts."""
        return [
            f"The town lies on the river {self.river}.",
            f"The town was founded in {self.founded}.",
            f"The twin town is {self.twin}.",
            f"The mayor is {self.mayor}.",
        ]


def towns(rng: random.Random, count: int) -> list[Town]:
    """Return towns with different names, years and mayors. Their twins form one circle, so that no chain of twins comes
    back early. ``count`` is at most ``MOST_DOCUMENTS``."""
    names = ["".join(parts) for parts in _distinct(rng, count, _HEADS.split(), _MIDDLES.split(), _ENDS.split())]
    families = ["".join(parts) for parts in _distinct(rng, count, _HEADS.split(), _MIDDLES.split(), ["son", "man"])]
    circle = rng.sample(names, count)
    twin = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
    years = rng.sample(_YEARS, count)
    return [
        Town(name, rng.choice(_RIVERS), year, twin[name], f"{rng.choice(_FIRST)} {family}")
        for name, year, family in zip(names, years, families, strict=True)
    ]


def _distinct(rng: random.Random, count: int, *parts: list[str]) -> list[tuple[str, ...]]:
    return rng.sample(list(product(*parts)), count)


Posed = tuple[list[Town], str, str]  # towns in the order of their documents, question, answer


def _chain(rng: random.Random, items: int, count: int) -> Posed:
    drawn, steps = towns(rng, count), min(items, count - 1)
    by_name, town = {town.name: town for town in drawn}, rng.choice(drawn)
    question = f"Who is the mayor of {'the twin town of ' * steps}{town.name}?"
    for _ in range(steps):
        town = by_name[town.twin]
    return drawn, question, town.mayor


def _comparison(rng: random.Random, items: int, count: int) -> Posed:
    drawn = towns(rng, count)
    compared = rng.sample(drawn, min(items + 2, count))
    names = ", ".join(town.name for town in compared)
    question = f"Which of these towns was founded first: {names}? Give the name of the mayor of that town."
    return drawn, question, min(compared, key=lambda town: town.founded).mayor


def _count(rng: random.Random, items: int, count: int) -> Posed:
    """Each number from 1 to ``count - 1`` is equally likely. The other towns lie on another river, or are younger."""
    drawn, river, number = towns(rng, count), rng.choice(_RIVERS), rng.randint(1, count - 1)
    limit = sorted(town.founded for town in drawn)[rng.randint(number, count - 1)]
    early = [town for town in drawn if town.founded < limit]
    right = {town.name for town in rng.sample(early, number)}
    others = [name for name in _RIVERS if name != river]
    for place, town in enumerate(drawn):
        rivers = [river] if town.name in right else others if town.founded < limit else _RIVERS
        drawn[place] = replace(town, river=rng.choice(rivers))
    return drawn, f"How many of the towns lie on the river {river} and were founded before {limit}?", str(number)


KINDS: dict[DocumentKind, Callable[[random.Random, int, int], Posed]] = {
    "chain": _chain,
    "comparison": _comparison,
    "count": _count,
}


def guesses(prompt: str) -> dict[str, str]:
    """Return answers to a prompt over documents that need no more than one of them, by what they are; empty for another
    prompt."""
    mayors = re.findall(r"The mayor is ([\w ]+)\.", prompt)
    if not mayors:
        return {}
    titles = re.findall(r"^Document \d+: (\w+)$", prompt, re.MULTILINE)
    question = prompt.rpartition("\n\n")[2]
    asked = [title for title in re.findall(r"\w+", question) if title in titles]
    names = Counter(re.findall(r"(?<=[a-z] )[A-Z]\w+(?: [A-Z]\w+)?", prompt.rpartition("\n\n")[0]))
    return {
        "the mayor of the first document": mayors[0],
        "the mayor of the last document": mayors[-1],
        "the mayor of the first town in the question": mayors[titles.index(asked[0])] if asked else mayors[0],
        "the most frequent name": names.most_common(1)[0][0],
        "the number of documents": str(len(titles)),
        "half the number of documents": str(len(titles) // 2),
    }
