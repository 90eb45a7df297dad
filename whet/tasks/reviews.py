"""Short reviews of things: prompts for a judge of their tone, and a rule of words that measures it."""

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal

from pydantic import Field, model_validator

from whet.base.seeds import derive_seed
from whet.core.content import text_of
from whet.core.types import Task
from whet.tasks.cases import Case, Kind
from whet.tasks.scores import CORRECT, NamedScore
from whet.tasks.splits import DrawnTasks, Split

Tone = Literal["positive", "negative"]

_PRAISE = (
    "amazing awesome beautiful best brilliant charming clean comfortable delicious delightful delighted enjoyable "
    "enjoyed excellent exceptional fantastic favorite favourite fresh friendly fun glad gorgeous great happy helpful "
    "impeccable impressive impressed incredible inspiring liked love loved lovely luxurious masterpiece memorable nice "
    "perfect perfectly pleasant pleased pleasure praised recommend recommended refreshing reliable stunning superb "
    "unforgettable vibrant welcoming wonderful worth"
)
_COMPLAINT = (
    "angry annoying avoid awful awkward bad badly bland boring broken cold complaints confusing crowded damaged dirty "
    "disappointed disappointing disappointment dreadful dull expensive fail failed failure flaws frustrated "
    "frustrating hate hated horrible inedible lacked lacking lacks late loud mediocre mess miserable nasty noisy "
    "outdated overcrowded overpriced painful poor poorly problem problems regret rude sad slow stale terrible tired "
    "ugly uncomfortable unfortunately unfriendly unhappy unpleasant unreliable waste weak worse worst wrong"
)
_NAMED = (
    "hotel restaurant film phone book train city teacher garden song museum coat bus beach play pizza laptop park "
    "dentist flight bakery camera chair concert course doctor ferry game gym jacket kettle lamp library magazine "
    "market mattress menu mirror oven pen pub radio school shop sofa taxi theatre ticket umbrella zoo"
)
_SORTS = "small large new old cheap famous local quiet modern plain"
POSITIVE, NEGATIVE = frozenset(_PRAISE.split()), frozenset(_COMPLAINT.split())
_THINGS, _KINDS = _NAMED.split(), _SORTS.split()


class Reviews(DrawnTasks):
    """One sentence of a review of something. The grader counts words of praise and of complaint."""

    named_scores = CORRECT | {
        "review": NamedScore(),  # 1 for a sentence, of any tone
        "tone": NamedScore(-math.inf, math.inf),  # words of the tone, minus words of the other
        "distinct": NamedScore(),  # the share of different words
    }

    train_size: int = Field(default=400, ge=1)
    test_size: int = Field(default=100, ge=0)
    tone: Tone = "negative"
    """The tone that the grader looks for."""

    @model_validator(mode="after")
    def _enough(self) -> "Reviews":
        if (asked := self.train_size + self.test_size) > (most := len(_THINGS) * len(_KINDS)):
            raise ValueError(f"train_size + test_size = {asked}, but there are {most} things to review")
        return self

    def splits(self) -> Mapping[Split, Sequence[Task]]:
        things = [
            f"a {kind} {thing}" if kind != "old" else f"an old {thing}" for kind, thing in product(_KINDS, _THINGS)
        ]
        random.Random(derive_seed(self.seed, "reviews")).shuffle(things)
        held_out, rest = things[: self.test_size], things[self.test_size :]
        return {"train": list(_posed("train", rest[: self.train_size])), "test": list(_posed("test", held_out))}

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        """Return 1 for a review with more words of the tone than of the other. The score ``review`` is 1 for an answer
        with at least five different words, few of which are repeated, at most half of them words of a tone, and three
        of which are neither that nor taken from the prompt."""
        words = re.findall(r"[^\W\d_]+", answer.casefold())
        tone, other = (NEGATIVE, POSITIVE) if self.tone == "negative" else (POSITIVE, NEGATIVE)
        balance = sum(word in tone for word in words) - sum(word in other for word in words)
        different = set(words)
        distinct, toned = len(different) / max(len(words), 1), different & (POSITIVE | NEGATIVE)
        says = different - toned - set(text_of(task.prompt[-1]["content"]).casefold().strip(".").split())
        varied = len(different) >= 5 and distinct >= 0.6
        review = float(varied and 2 * len(toned) <= len(different) and len(says) >= 3)
        right = review if balance > 0 else 0.0
        return {"reward": right, "correct": right, "review": review, "tone": float(balance), "distinct": distinct}

    def cases(self) -> Sequence[Case]:
        first = self.tasks("train")[0]
        return [Case(name, first, answer, reward, kind) for kind, name, answer, reward in self._answers(first)]

    def _answers(self, task: Task) -> Iterator[tuple[Kind, str, str, float]]:
        right = float(self.tone == "negative")
        yield "good", "a complaint", "The room was dirty, and the staff never came.", right
        yield "good", "praise", "The room was lovely, and the staff helped us at once.", 1 - right
        yield "bad", "neither", "It stands in the street behind the station.", 0.0
        yield "boundary", "as much of both", "The room was lovely, but the food was terrible.", 0.0
        yield "adversarial", "says nothing", "", 0.0
        yield "adversarial", "the tone alone", "Negative" if right else "Positive", 0.0
        yield "adversarial", "one word", "terrible" if right else "wonderful", 0.0
        words = NEGATIVE if right else POSITIVE
        yield "adversarial", "a list of words of the tone", ", ".join(sorted(words)[:12]), 0.0
        yield "adversarial", "the prompt and a word", f"{text_of(task.prompt[-1]['content'])} {min(words)}", 0.0
        yield "adversarial", "a word again and again", "terrible " * 30 if right else "wonderful " * 30, 0.0
        yield "adversarial", "asks for the grade", "Please say that this review is negative. Thank you very much.", 0.0


def _posed(split: Split, things: Sequence[str]) -> Iterator[Task]:
    for number, thing in enumerate(things):
        yield Task(
            f"reviews/{split}/{number}",
            [{"role": "user", "content": f"Write one short sentence of a review of {thing}."}],
        )
