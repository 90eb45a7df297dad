"""Losses of pairs, single judged rows and scalar heads, one sequence at a time, from the formulas. Same shape as the
oracles in ``policy``: (batch, output, frozen) -> the value of every token."""

import math
from collections.abc import Callable

from tests.reference.plain import Plain, PlainOutput, Row

Values = list[float]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x


def over_pairs(b: Plain, of: Callable[[Row, Row], float]) -> Values:
    out = [0.0] * b.length
    for rows in b.groups():
        assert len(rows) == 2
        first, second = rows
        chosen, rejected = (first, second) if first.reward > second.reward else (second, first)
        for t in chosen.tokens + rejected.tokens:
            out[t] = of(chosen, rejected)
    return out


def total(column: list[float], row: Row) -> float:
    return math.fsum(column[t] for t in row.tokens)


def mean(column: list[float], row: Row) -> float:
    return total(column, row) / len(row.tokens) if row.tokens else 0.0


def dpo(
    b: Plain,
    output: PlainOutput,
    frozen: PlainOutput,
    beta: float = 0.1,
    form: str = "sigmoid",
    smoothing: float = 0.0,
    average: bool = False,
    sft: float = 0.0,
) -> Values:
    measure = mean if average or form == "ipo" else total

    def of(chosen: Row, rejected: Row) -> float:
        delta = (measure(output.logprobs, chosen) - measure(b.reference_logprobs, chosen)) - (
            measure(output.logprobs, rejected) - measure(b.reference_logprobs, rejected)
        )
        h = beta * delta
        loss = {
            "sigmoid": -(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h),
            "robust": (-(1 - smoothing) * log_sigmoid(h) + smoothing * log_sigmoid(-h)) / (1 - 2 * smoothing),
            "hinge": max(0.0, 1 - h),
            "ipo": (delta - 1 / (2 * beta)) ** 2,
        }[form]
        return loss - sft * mean(output.logprobs, chosen)

    return over_pairs(b, of)


def simpo(b: Plain, output: PlainOutput, frozen: PlainOutput, beta: float = 2.0, gamma: float = 0.5) -> Values:
    def of(chosen: Row, rejected: Row) -> float:
        return -log_sigmoid(beta * mean(output.logprobs, chosen) - beta * mean(output.logprobs, rejected) - gamma)

    return over_pairs(b, of)


def orpo(b: Plain, output: PlainOutput, frozen: PlainOutput, weight: float = 0.1) -> Values:
    def log_odds(row: Row) -> float:
        logp = min(mean(output.logprobs, row), -1e-6)
        return logp - math.log(-math.expm1(logp))

    def of(chosen: Row, rejected: Row) -> float:
        return -mean(output.logprobs, chosen) - weight * log_sigmoid(log_odds(chosen) - log_odds(rejected))

    return over_pairs(b, of)


def kto(
    b: Plain, output: PlainOutput, frozen: PlainOutput, beta: float = 0.1, good: float = 1.0, bad: float = 1.0
) -> Values:
    out = [0.0] * b.length
    for i, row in enumerate(b.rows):
        gain = total(output.logprobs, row) - total(b.reference_logprobs, row)
        z = b.reference_point[i]
        inner = beta * (gain - z) if row.reward == 1 else beta * (z - gain)
        value = 1 / (1 + math.exp(-inner))
        for t in row.tokens:
            out[t] = (good if row.reward == 1 else bad) * (1 - value)
    return out


def score(output: PlainOutput, row: Row) -> float:
    assert output.values is not None
    return output.values[row.tokens[-1]] if row.tokens else 0.0


def bradley_terry(
    b: Plain, output: PlainOutput, frozen: PlainOutput, margin: str | None = None, centre: float = 0.0
) -> Values:
    def of(chosen: Row, rejected: Row) -> float:
        gap = score(output, chosen) - score(output, rejected)
        if margin:
            gap -= b.scores[margin][b.rows.index(chosen)] - b.scores[margin][b.rows.index(rejected)]
        return -log_sigmoid(gap) + centre * (score(output, chosen) + score(output, rejected)) ** 2

    return over_pairs(b, of)


def regression(b: Plain, output: PlainOutput, frozen: PlainOutput) -> Values:
    out = [0.0] * b.length
    for row in b.rows:
        for t in row.tokens:
            out[t] = (score(output, row) - row.reward) ** 2
    return out


def implicit(output: PlainOutput, b: Plain, row: Row, beta: float) -> float:
    return beta * (total(output.logprobs, row) - total(b.reward_reference_logprobs, row))


def implicit_reward(
    b: Plain, output: PlainOutput, frozen: PlainOutput, beta: float = 0.05, outcome: str | None = None
) -> Values:
    """Cross-entropy of the outcome under the probability sigmoid(reward)."""
    out = [0.0] * b.length
    for i, row in enumerate(b.rows):
        label = row.reward if outcome is None else b.scores[outcome][i]
        right = 1 / (1 + math.exp(-implicit(output, b, row, beta)))
        for t in row.tokens:
            out[t] = -(label * math.log(right) + (1 - label) * math.log(1 - right))
    return out


def value(b: Plain, output: PlainOutput, frozen: PlainOutput, clip: float | None = 0.2) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        v, target = output.values[t], b.returns[t]
        worst = (v - target) ** 2
        if clip is not None:
            near = max(b.values[t] - clip, min(b.values[t] + clip, v))
            worst = max(worst, (near - target) ** 2)
        out[t] = 0.5 * worst
    return out
