"""The arithmetic of a generative reward model that compares answers in pairs: who is compared with whom, what its
verdict says, and what each answer is worth then. Pure functions.

    verdict: {"score_1": 1..5, "score_2": 1..5, "ranking": 1..6}            below 3.5: the first is better
    tie (score_1 = score_2):  score_1 += 3.5 - ranking,  score_2 -= 3.5 - ranking
    base(i) = mean of the scores that i was given
    reward  = base + style and length terms, which compare the finished, non-empty answers of the group

Source: Nemotron 3 Nano's report (circular comparison, group-relative length control) and NeMo Gym's ``genrm_compare``.
Where theirs can be bought, ours differs: an empty answer, or one that was cut off, gets no bonus for being short, and
scores stay in their range.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from pydantic import Field

from whet.config import Config

Pairs = Literal["circular", "all"]
_MIDDLE = 3.5
_FENCED = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL | re.IGNORECASE)
_LONGEST, _MOST = 100_000, 1_000  # characters of a verdict; braces in it


@dataclass(frozen=True, slots=True)
class Comparison:
    """A verdict on two answers."""

    score_1: float  # 1 to 5
    score_2: float
    ranking: float  # 1 (the first is much better) to 6

    @property
    def points(self) -> tuple[float, float]:
        """The scores, with a tie broken by the ranking, from 1 to 5."""
        if self.score_1 != self.score_2:
            return self.score_1, self.score_2
        shift = _MIDDLE - self.ranking
        return min(max(self.score_1 + shift, 1.0), 5.0), min(max(self.score_2 - shift, 1.0), 5.0)


class LengthControl(Config):
    """Short answers among good ones are worth more. All in points of reward; lengths in characters."""

    thinking: float = Field(0.0, ge=0)
    """Weight of the thought's relative shortness in the group, centred."""
    answer: float = Field(0.0, ge=0)
    """Weight of the answer's."""
    thinking_bonus: float = Field(0.0, ge=0)
    """For the shortest thought, if its answer is among the best."""
    answer_bonus: float = Field(0.0, ge=0)
    """For the shortest answer, if it is among the best."""
    best: float = Field(0.2, gt=0, le=1)
    """The share of the group that counts as the best."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is compared: a final answer, and the thought before it."""

    text: str
    thought: str = ""
    finished: bool = True  # not cut off

    @property
    def counts(self) -> bool:
        """Return whether it may earn something for being short."""
        return self.finished and bool(self.text.strip())


def pairs(kind: Pairs, count: int) -> list[tuple[int, int]]:
    """Return whom to compare: each answer with the next one, in a circle, or all with all. Two answers in a circle are
    compared in both orders."""
    if kind == "all":
        return list(combinations(range(count), 2))
    return [(i, (i + 1) % count) for i in range(count)] if count > 1 else []


def read_comparison(text: str) -> Comparison | None:
    """Return the verdict: the last valid object in a fence, else the last valid one anywhere. None where a number is
    missing or out of its range: half a verdict is none."""
    text = text[-_LONGEST:]
    fenced = [found for block in _FENCED.findall(text) for found in _objects(block)]
    for found in reversed(fenced or list(_objects(text))):
        inner = found.get("overall")
        verdict = inner if isinstance(inner, dict) else found
        values = [verdict.get(name) for name in ("score_1", "score_2", "ranking")]
        numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and -9 < v < 9]
        if len(numbers) == 3 and all(1 <= n <= top for n, top in zip(numbers, (5, 5, 6), strict=True)):
            return Comparison(*numbers)
    return None


def _objects(text: str) -> Iterable[dict[str, Any]]:
    """Yield the JSON objects in a text that are not inside another, in order."""
    at, tried = 0, 0
    while (at := text.find("{", at)) >= 0 and tried < _MOST:
        tried += 1
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        at = end
        if isinstance(found, dict):
            yield found


def base_rewards(count: int, compared: Sequence[tuple[int, int]], verdicts: Sequence[Comparison]) -> list[float]:
    """Return the mean points of each of ``count`` answers over its comparisons; an answer without one gets 3."""
    points: list[list[float]] = [[] for _ in range(count)]
    for (i, j), verdict in zip(compared, verdicts, strict=True):
        first, second = verdict.points
        points[i].append(first)
        points[j].append(second)
    return [math.fsum(own) / len(own) if own else 3.0 for own in points]


def length_rewards(base: Sequence[float], answers: Sequence[Answer], control: LengthControl) -> list[float]:
    """Return what each answer gets beside its base. Answers that don't count get the least that any other one gets, and
    nothing where nobody gets less than 0."""
    counted = [i for i, answer in enumerate(answers) if answer.counts]
    found = [0.0] * len(answers)
    if len(counted) < 2:
        return found
    threshold = sorted(base, reverse=True)[max(0, int(len(base) * control.best) - 1)]
    thoughts = [i for i in counted if answers[i].thought.strip()]
    for members, weight, bonus, size in (
        (thoughts, control.thinking, control.thinking_bonus, lambda i: len(answers[i].thought.strip())),
        (counted, control.answer, control.answer_bonus, lambda i: len(answers[i].text.strip())),
    ):
        lengths = {i: size(i) for i in members}
        for i, share in _shortness(lengths).items():
            found[i] += weight * share
        if lengths:
            shortest = min(lengths, key=lengths.__getitem__)
            found[shortest] += bonus * (base[shortest] >= threshold)
    least = min(0.0, *(found[i] for i in counted))
    return [value if i in counted else least for i, value in enumerate(found)]


def _shortness(lengths: dict[int, int]) -> dict[int, float]:
    """Return 1 for the shortest down to 0 for the longest, minus the mean."""
    if len(set(lengths.values())) < 2:
        return dict.fromkeys(lengths, 0.0)
    low, high = min(lengths.values()), max(lengths.values())
    raw = {i: 1 - (length - low) / (high - low) for i, length in lengths.items()}
    mean = math.fsum(raw.values()) / len(raw)
    return {i: value - mean for i, value in raw.items()}
