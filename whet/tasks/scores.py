"""Named scores: the parts of a grade, declared once by the class that grades.

    class Polite(TaskSet):
        named_scores = {"correct": NamedScore(weight=1.0), "words": NamedScore(high=500)}

A recipe's ``rewards`` and GDPO's components name them, and a name that is not declared is an error when the recipe is
read. A grade has declared scores only, each within its range.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whet.base.errors import DataError
from whet.config.issues import did_you_mean

_ROUNDING = 1e-6  # of a mean or a share


@dataclass(frozen=True, slots=True)
class NamedScore:
    """The range of a score, and its weight in the reward."""

    low: float = 0.0
    high: float = 1.0
    weight: float = 0.0  # in the reward of a grade without the key "reward"


NamedScores = dict[str, NamedScore]
CORRECT: NamedScores = {"correct": NamedScore()}
FORMAT: NamedScores = CORRECT | {"format": NamedScore()}  # format: 1 if there is an answer to grade


def check_named(scores: Mapping[str, float], declared: NamedScores, where: str) -> None:
    """Raise ``DataError`` for a score that is not declared or is outside its range. ``where`` names the grader."""
    for name, value in scores.items():
        if name == "reward":
            continue
        if name not in declared:
            names = ", ".join(declared)
            raise DataError(
                f"{where} returned the score {name!r}, which its class doesn't declare in named_scores ({names})."
                f"{did_you_mean(name, declared)}"
            )
        low, high = declared[name].low, declared[name].high
        if not low - _ROUNDING <= value <= high + _ROUNDING:
            raise DataError(f"{where} returned the score {name} = {value:g}; it is declared from {low:g} to {high:g}")


def weighted_reward(scores: Mapping[str, float], declared: NamedScores) -> float | None:
    """Return the sum of the scores by their declared weights; None if no score has a weight, or one that has is
    missing."""
    weights = {name: score.weight for name, score in declared.items() if score.weight}
    if not weights or not weights.keys() <= scores.keys():
        return None
    return sum(weight * scores[name] for name, weight in weights.items())
