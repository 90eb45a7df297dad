"""The arithmetic of a generative reward model that compares answers in pairs: the pairs, its verdicts, and the rewards.

    verdict: {"score_1": 1..5, "score_2": 1..5, "ranking": 1..6}; a ranking below 3.5 prefers the first answer
    tie (score_1 = score_2):  score_1 += 3.5 - ranking,  score_2 -= 3.5 - ranking
    base(i) = mean of the scores of answer i
    reward  = base + length terms, which compare the finished, non-empty answers of the group

Source: Nemotron 3 Nano's report (circular comparison, group-relative length control) and NeMo Gym's ``genrm_compare``.
Two changes prevent reward hacking: an empty or cut answer gets no bonus for being short, and scores stay in their
range.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from pydantic import Field

from whet.config import Config

Pairs = Literal["circular", "all"]
_MIDDLE = 3.5
_FENCED = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL | re.IGNORECASE)
_LONGEST, _MOST = 100_000, 1_000  # limits of a verdict: characters, and braces that are tried


@dataclass(frozen=True, slots=True)
class Comparison:
    """A verdict on two answers."""

    score_1: float  # 1 to 5
    score_2: float
    ranking: float  # 1 (the first is much better) to 6

    @property
    def points(self) -> tuple[float, float]:
        """Return the two scores, from 1 to 5; the ranking breaks a tie."""
        if self.score_1 != self.score_2:
            return self.score_1, self.score_2
        shift = _MIDDLE - self.ranking
        return min(max(self.score_1 + shift, 1.0), 5.0), min(max(self.score_2 - shift, 1.0), 5.0)


class LengthControl(Config):
    """Reward terms for short answers, in points of reward. Lengths are in characters."""

    thinking: float = Field(0.0, ge=0)
    """Weight of the relative shortness of the thought in the group, centred."""
    answer: float = Field(0.0, ge=0)
    """Weight of the relative shortness of the answer in the group, centred."""
    thinking_bonus: float = Field(0.0, ge=0)
    """Bonus for the shortest thought, if its answer is among the best."""
    answer_bonus: float = Field(0.0, ge=0)
    """Bonus for the shortest answer, if it is among the best."""
    best: float = Field(0.2, gt=0, le=1)
    """The share of the group that counts as the best."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A final answer to be compared, and the thought before it."""

    text: str
    thought: str = ""
    finished: bool = True  # not cut by a limit

    @property
    def counts(self) -> bool:
        """Return whether the answer may earn a bonus for being short."""
        return self.finished and bool(self.text.strip())


def pairs(kind: Pairs, count: int) -> list[tuple[int, int]]:
    """Return the pairs to compare: each answer with the next one in a circle, or all pairs. A circle of two answers
    compares them in both orders."""
    if kind == "all":
        return list(combinations(range(count), 2))
    return [(i, (i + 1) % count) for i in range(count)] if count > 1 else []


def read_comparison(text: str) -> Comparison | None:
    """Return the verdict, which is a JSON object in a fence or, without a fence, in the text. None if a number is
    missing or out of its range, or if two verdicts differ: one may be quoted from an answer."""
    text = text[-_LONGEST:]
    fenced = [value for block in _FENCED.findall(text) for value in _objects(block)]
    verdicts = set[Comparison]()
    for value in fenced or _objects(text):
        inner = value.get("overall")
        verdict = inner if isinstance(inner, dict) else value
        values = [verdict.get(name) for name in ("score_1", "score_2", "ranking")]
        numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and -9 < v < 9]
        if len(numbers) == 3 and all(1 <= n <= top for n, top in zip(numbers, (5, 5, 6), strict=True)):
            verdicts.add(Comparison(*numbers))
    return verdicts.pop() if len(verdicts) == 1 else None


def _objects(text: str) -> Iterable[dict[str, object]]:
    """Yield the outermost JSON objects in a text, in order."""
    at, tried = 0, 0
    while (at := text.find("{", at)) >= 0 and tried < _MOST:
        tried += 1
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        at = end
        if isinstance(value, dict):
            yield value


def base_rewards(count: int, compared: Sequence[tuple[int, int]], verdicts: Sequence[Comparison]) -> list[float]:
    """Return the mean points of each of ``count`` answers over its comparisons; 3 for an answer without one."""
    points: list[list[float]] = [[] for _ in range(count)]
    for (i, j), verdict in zip(compared, verdicts, strict=True):
        first, second = verdict.points
        points[i].append(first)
        points[j].append(second)
    return [math.fsum(values) / len(values) if values else 3.0 for values in points]


def length_rewards(base: Sequence[float], answers: Sequence[Answer], control: LengthControl) -> list[float]:
    """Return the length term of each answer, which is added to its base reward. Answers that don't count get the least
    term of the other answers, and at most 0."""
    counted = [i for i, answer in enumerate(answers) if answer.counts]
    terms = [0.0] * len(answers)
    if len(counted) < 2:
        return terms
    threshold = sorted(base, reverse=True)[max(0, int(len(base) * control.best) - 1)]
    thoughts = [i for i in counted if answers[i].thought.strip()]
    for members, weight, bonus, size in (
        (thoughts, control.thinking, control.thinking_bonus, lambda i: len(answers[i].thought.strip())),
        (counted, control.answer, control.answer_bonus, lambda i: len(answers[i].text.strip())),
    ):
        lengths = {i: size(i) for i in members}
        for i, share in _shortness(lengths).items():
            terms[i] += weight * share
        if lengths:
            shortest = min(lengths, key=lengths.__getitem__)
            terms[shortest] += bonus * (base[shortest] >= threshold)
    least = min(0.0, *(terms[i] for i in counted))
    return [term if i in counted else least for i, term in enumerate(terms)]


def _shortness(lengths: dict[int, int]) -> dict[int, float]:
    """Return the shortness of each length, from 1 for the shortest to 0 for the longest, minus the mean."""
    if len(set(lengths.values())) < 2:
        return dict.fromkeys(lengths, 0.0)
    low, high = min(lengths.values()), max(lengths.values())
    raw = {i: 1 - (length - low) / (high - low) for i, length in lengths.items()}
    mean = math.fsum(raw.values()) / len(raw)
    return {i: value - mean for i, value in raw.items()}
