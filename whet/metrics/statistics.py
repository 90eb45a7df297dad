"""Statistics of accuracies: intervals, tests and unbiased estimates. Pure functions of counts and outcomes."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist, fmean

import numpy as np

from whet.base.seeds import derive_seed

_CONFIDENCE = 0.95  # of all intervals
_RESAMPLES = 4000  # of a bootstrap interval
_SUBSETS = 200  # random subsets of samples for maj@k


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (Wilson 1927), which is also valid at 0, at 1 and for small ``n``.

    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes among {n} is not a proportion")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def newcombe(before: float, n_before: int, after: float, n_after: int) -> tuple[float, float, float]:
    """Return the difference of two independent proportions, after - before: (difference, low, high).

    Newcombe's hybrid score interval (Newcombe 1998, method 10). ``before`` and ``after`` are counts of successes. For
    results on the same tasks it is too wide: use ``paired_difference`` if the single outcomes are known."""
    if not (n_before and n_after):
        return 0.0, -1.0, 1.0
    p, q = before / n_before, after / n_after
    (p_low, p_high), (q_low, q_high) = wilson(before, n_before), wilson(after, n_after)
    d = q - p
    return d, d - math.hypot(q - q_low, p_high - p), d + math.hypot(q_high - q, p - p_low)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of ``k`` answers is correct, given ``correct`` of ``n`` samples.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374), as a product, which does not
    overflow. Raises ValueError unless 1 <= k <= n and 0 <= correct <= n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got {n=}, {correct=}, {k=}")
    miss = 1.0
    for i in range(n - correct + 1, n + 1):
        miss *= max(0, i - k) / i
    return 1.0 - miss


def majority_at_k(
    answers: Sequence[str | None], correct: Sequence[bool], k: int, share: float = 0.0, seed: int = 0
) -> float:
    """Return the probability that the most frequent of ``k`` answers to a task is correct and has at least a ``share``
    of the ``k`` votes.

    ``answers`` are texts that are equal for equal answers; None is a sample without an answer, which votes for nothing.
    Among several most frequent answers each is chosen with the same probability. For ``k`` below the number of samples
    this is the mean over 200 random subsets.

    >>> majority_at_k(["4", "4", "5", None], [True, True, False, False], 4)
    1.0
    >>> majority_at_k(["4", "4", "5", None], [True, True, False, False], 4, share=0.75)
    0.0
    """
    n = len(answers)
    if not 1 <= k <= n or len(correct) != n:
        raise ValueError(f"maj@k needs 1 <= k <= n samples, got n={n}, {k=} and {len(correct)} outcomes")
    right = {answer for answer, is_right in zip(answers, correct, strict=True) if is_right and answer is not None}

    def outcome(votes: Sequence[str | None]) -> float:
        counts = Counter(vote for vote in votes if vote is not None)
        most = max(counts.values(), default=0)
        if most == 0 or most / k < share:  # share * k would round up, as in 0.56 * 25
            return 0.0
        first = [answer for answer, count in counts.items() if count == most]
        return sum(answer in right for answer in first) / len(first)

    if k == n:
        return outcome(answers)
    random = np.random.default_rng(derive_seed("majority_at_k", seed))
    return fmean(outcome([answers[i] for i in random.choice(n, size=k, replace=False)]) for _ in range(_SUBSETS))


def paired_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of after - before on the same tasks and its bootstrap interval over tasks: (mean, low, high).

    ``before[i]`` and ``after[i]`` are scores of the same task: 0 or 1, or a mean over several samples."""
    differences = _differences(before, after)
    if not differences:
        raise ValueError("a paired difference needs at least one task")
    random = np.random.default_rng(derive_seed("paired_difference", 0))
    values = np.asarray(differences)
    # One resample at a time: an array of resamples x tasks indices would be large for long evaluations.
    means = np.array([values[random.integers(len(values), size=len(values))].mean() for _ in range(_RESAMPLES)])
    tail = (1 - _CONFIDENCE) / 2
    return fmean(differences), float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Return the exact two-sided p-value that two models are equally accurate on the same tasks (McNemar 1947)."""
    differences = _differences(before, after)
    won, lost = differences.count(1), differences.count(-1)
    n = won + lost
    if n == 0:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(min(won, lost) + 1)]
    return min(1.0, 2 * math.fsum(math.exp(value - n * math.log(2)) for value in logs))


def _differences(before: Sequence[float], after: Sequence[float]) -> list[float]:
    if len(before) != len(after):
        raise ValueError(f"paired outcomes must be of the same tasks, got {len(before)} before and {len(after)} after")
    return [float(b) - float(a) for a, b in zip(before, after, strict=True)]
