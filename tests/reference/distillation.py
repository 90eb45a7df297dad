"""Supervised and distillation losses, one token at a time. Same shape as the oracles in ``policy``."""

import math

from tests.reference.plain import Plain, PlainOutput

Values = list[float]


def sft(b: Plain, output: PlainOutput, frozen: PlainOutput) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        out[t] = -output.logprobs[t]
    return out


def on_policy(b: Plain, output: PlainOutput, frozen: PlainOutput, clamp: float = 10.0) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        advantage = max(-clamp, min(clamp, b.teacher_token_logprobs[t] - frozen.logprobs[t]))
        out[t] = -advantage * output.logprobs[t]
    return out


def whole(logprobs: list[float], tail: str) -> list[float]:
    """Probabilities that add up to 1."""
    p = [math.exp(x) for x in logprobs]
    if tail == "renormalise":
        return [x / math.fsum(p) for x in p]
    return [*p, max(1 - math.fsum(p), -math.expm1(-1e-6))]


def divergence(p: list[float], q: list[float]) -> float:
    return math.fsum(x * (math.log(x) - math.log(y)) for x, y in zip(p, q, strict=True) if x > 0)


def distillation(
    b: Plain,
    output: PlainOutput,
    frozen: PlainOutput,
    form: str = "forward",
    tail: str = "renormalise",
    mix: float = 0.5,
) -> Values:
    out = [0.0] * b.length
    assert output.topk is not None
    for t in b.trained:
        teacher, student = whole(b.teacher_logprobs[t], tail), whole(output.topk[t], tail)
        middle = [mix * x + (1 - mix) * y for x, y in zip(teacher, student, strict=True)]
        forward, reverse = divergence(teacher, student), divergence(student, teacher)
        out[t] = {
            "forward": forward,
            "reverse": reverse,
            "mixed": mix * forward + (1 - mix) * reverse,
            "jsd": mix * divergence(teacher, middle) + (1 - mix) * divergence(student, middle),
        }[form]
    return out
