"""Several teachers as one, one place and one token at a time."""

import math


def mixture(logprobs: list[float], weights: list[float]) -> float:
    return math.log(sum(w * math.exp(lp) for w, lp in zip(weights, logprobs, strict=True)) / sum(weights))


def top_of_union(tables: list[list[float]], weights: list[float], k: int) -> list[tuple[int, float]]:
    """From every teacher's whole distribution at one place: the k likeliest under the mixture among those tokens that
    are among the k likeliest of some teacher. (token, log-prob), likeliest first."""
    named: set[int] = set()
    for table in tables:
        named |= set(sorted(range(len(table)), key=lambda token: -table[token])[:k])
    mixed = {token: mixture([table[token] for table in tables], weights) for token in named}
    return sorted(mixed.items(), key=lambda pair: -pair[1])[:k]
