"""A small policy that is trained to cheat: it writes an answer part by part, and is trained by the rewards alone.

Each part is drawn by the part before it, from a table of logits; the answers of a batch are to one task, and those
above the batch's mean become likelier (REINFORCE with the group's mean as its baseline, as in GRPO).
"""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from whet.core.types import Task
from whet.tasks.attack.search import Recipe, written

BATCH = 16  # answers to one task
_LONGEST = 12  # parts of an answer
_RATE = 0.1  # larger ones settle on the first answers that earn something


class Policy:
    """Answers of ``parts``, which are at first equally likely."""

    def __init__(self, parts: Iterable[str], seed: int) -> None:
        self.parts = tuple(dict.fromkeys(parts))
        self.end = len(self.parts)  # stands for the beginning and for the end
        self.rng = random.Random(seed)
        self.logits = defaultdict[int, list[float]](lambda: [0.0] * (self.end + 1))  # by the part before

    def sample(self) -> list[int]:
        """Return the numbers of an answer's parts."""
        return self._drawn(lambda before: self.rng.choices(range(self.end + 1), self._shares(before))[0])

    def likeliest(self) -> Recipe:
        """Return an answer whose parts are the likeliest ones."""
        return self.recipe(self._drawn(lambda before: max(range(self.end + 1), key=self.logits[before].__getitem__)))

    def recipe(self, numbers: Sequence[int]) -> Recipe:
        return tuple(self.parts[number] for number in numbers)

    def learn(self, answers: Sequence[Sequence[int]], rewards: Sequence[float]) -> None:
        """Make answers above the mean reward likelier, and others less likely."""
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        if deviation == 0:
            return
        shares = {before: self._shares(before) for answer in answers for before in (self.end, *answer)}
        for answer, reward in zip(answers, rewards, strict=True):
            gain = _RATE * (reward - mean) / deviation
            ended = [self.end] if len(answer) < _LONGEST else []
            for before, number in zip((self.end, *answer), (*answer, *ended), strict=False):
                row = self.logits[before]
                for other, share in enumerate(shares[before]):
                    row[other] += gain * ((other == number) - share)

    def _drawn(self, choose: Callable[[int], int]) -> list[int]:
        answer: list[int] = []
        while len(answer) < _LONGEST:
            number = choose(answer[-1] if answer else self.end)
            if number == self.end:
                break
            answer.append(number)
        return answer

    def _shares(self, before: int) -> list[float]:
        row = self.logits[before]
        highest = max(row)
        weights = [math.exp(logit - highest) for logit in row]
        total = sum(weights)
        return [weight / total for weight in weights]


async def train(
    policy: Policy, tasks: Sequence[Task], reward: Callable[[Task, str], Awaitable[float]], steps: int
) -> Recipe:
    """Train the policy on one task after another, for ``steps`` batches or until ``reward`` raises
    ``StopAsyncIteration``. Return its likeliest answer."""
    try:
        for step in range(steps):
            task = tasks[step % len(tasks)]
            answers = [policy.sample() for _ in range(BATCH)]
            rewards = [await reward(task, written(policy.recipe(answer), task)) for answer in answers]
            policy.learn(answers, rewards)
    except StopAsyncIteration:
        pass
    return policy.likeliest()
