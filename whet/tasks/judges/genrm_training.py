"""Tasks to train a generative reward model: it reads a conversation and two responses and writes a verdict, which is
compared with a verdict by people (Nemotron 3 Nano's report).

    R = -10 [no verdict] - |score_1 - gold_1| - |score_2 - gold_2| - |ranking - gold ranking|
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from whet.core.types import Message, Task
from whet.data.messages import Messages
from whet.data.row import Row, read_rows
from whet.tasks.cases import Case, Kind
from whet.tasks.judges.comparison import Comparison, read_comparison
from whet.tasks.judges.prompts import COMPARE, PRINCIPLE, asked, conversation, mark
from whet.tasks.scores import CORRECT, NamedScore
from whet.tasks.task_source import SourcedTasks


class JudgedPair(Row):
    """A row: ``context`` (messages), ``response1``, ``response2``, and the verdict of people on them."""

    context: Messages
    response1: str
    response2: str
    score_1: float = Field(ge=1, le=5)
    score_2: float = Field(ge=1, le=5)
    ranking: float = Field(ge=1, le=6)


@dataclass(frozen=True, slots=True)
class HumanVerdict:
    """The verdict of people on the two responses."""

    gold: Comparison


class GenRMTraining(SourcedTasks[HumanVerdict]):
    """Pairs of responses to judge: rows with verdicts, or generated pairs of a right and a wrong sum."""

    named_scores = CORRECT | {"malformed": NamedScore(), "apart": NamedScore(high=8), "ranked": NamedScore(high=5)}

    name: ClassVar[str] = "genrm_training"
    variety: ClassVar[str] = "digits"

    digits: int = Field(default=2, ge=1, le=9)
    """Digits of the numbers in generated sums."""
    swap: bool = True
    """Pose each pair of a row in both orders, so that neither position is better on average."""
    principle: str = PRINCIPLE
    """The criterion by which responses are compared."""
    malformed: float = Field(default=10.0, ge=0)
    """Penalty of a reply without a valid verdict."""
    helpfulness: float = Field(default=1.0, ge=0)
    """Weight of the error of each score."""
    rank: float = Field(default=1.0, ge=0)
    """Weight of the error of the ranking."""

    def read(self, path: str) -> list[Task[HumanVerdict]]:
        return [
            self._pose(row.context, first, second, verdict)
            for row in read_rows(path, JudgedPair, self.columns)
            for first, second, verdict in self._orders(
                row.response1, row.response2, Comparison(row.score_1, row.score_2, row.ranking)
            )
        ]

    def draw(self, rng: random.Random) -> Task[HumanVerdict]:
        a, b = (rng.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(2))
        wrong = a + b + rng.choice([-10, -1, 1, 2, 10])
        right_first = rng.random() < 0.5
        first, second = (f"{a} + {b} = {value}" for value in ((a + b, wrong) if right_first else (wrong, a + b)))
        verdict = Comparison(5, 1, 1) if right_first else Comparison(1, 5, 6)
        return self._pose([{"role": "user", "content": f"What is {a} + {b}?"}], first, second, verdict)

    def _orders(self, first: str, second: str, verdict: Comparison) -> list[tuple[str, str, Comparison]]:
        both = [(first, second, verdict)]
        if self.swap:
            both.append((second, first, Comparison(verdict.score_2, verdict.score_1, 7 - verdict.ranking)))
        return both

    def _pose(self, context: list[Message], first: str, second: str, verdict: Comparison) -> Task[HumanVerdict]:
        text = conversation(context)
        prompt = COMPARE.format(
            principle=self.principle, mark=mark(text, first, second), conversation=text, first=first, second=second
        )
        return Task("", asked(prompt), HumanVerdict(verdict))

    async def grade(self, task: Task[HumanVerdict], answer: str) -> dict[str, float]:
        verdict, gold = read_comparison(answer), task.data.gold
        if verdict is None:
            return {"reward": -self.malformed, "correct": 0.0, "malformed": 1.0}
        apart = abs(verdict.score_1 - gold.score_1) + abs(verdict.score_2 - gold.score_2)
        ranked = abs(verdict.ranking - gold.ranking)
        right = (verdict.ranking < 3.5) == (gold.ranking < 3.5)
        reward = -self.helpfulness * apart - self.rank * ranked
        return {"reward": reward, "correct": float(right), "malformed": 0.0, "apart": apart, "ranked": ranked}

    def gold(self, task: Task[HumanVerdict]) -> str | None:
        gold = task.data.gold
        verdict = f'{{"score_1": {gold.score_1:g}, "score_2": {gold.score_2:g}, "ranking": {gold.ranking:g}}}'
        return f"```json\n{verdict}\n```"

    def unearned(self, tasks: Sequence[Task[HumanVerdict]]) -> Iterable[Case]:
        """Return no cases: ``answers`` has a reply without a verdict, whose reward is negative."""
        return ()

    def answers(self, task: Task[HumanVerdict]) -> Iterator[tuple[Kind, str, str, float]]:
        yield "good", "the verdict of the row", self.gold(task) or "", 0.0
        yield "bad", "no verdict", "The first one is better.", -self.malformed
        yield "boundary", "half a verdict", '{"score_1": 5}', -self.malformed
        yield "adversarial", "numbers out of range", '{"score_1": 50, "score_2": 1, "ranking": 1}', -self.malformed
