"""Policy losses, one token at a time, from the formulas. Each oracle takes (batch, output, frozen) and returns the
value of every token, [N]; ``frozen`` is the model's output without a gradient, so that a finite difference in
``output`` alone is the gradient."""

import math

from tests.reference.plain import Plain, PlainOutput

Values = list[float]


def exp(x: float) -> float:
    """The exponent's documented bound."""
    return math.exp(max(-20.0, min(20.0, x)))


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def old(b: Plain, frozen: PlainOutput, t: int) -> float:
    return frozen.logprobs[t] if b.old_logprobs is None else b.old_logprobs[t]


def ratio(b: Plain, output: PlainOutput, frozen: PlainOutput, t: int) -> float:
    return exp(output.logprobs[t] - old(b, frozen, t))


def ppo(
    b: Plain, output: PlainOutput, frozen: PlainOutput, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        a, rho = b.advantages[t], ratio(b, output, frozen, t)
        out[t] = -min(rho * a, clip(rho, 1 - low, 1 + high) * a)
        if dual is not None and a < 0:
            out[t] = min(out[t], -dual * a)
    return out


def gspo(b: Plain, output: PlainOutput, frozen: PlainOutput, low: float = 3e-4, high: float = 4e-4) -> Values:
    out = [0.0] * b.length
    for row in b.rows:
        if not row.tokens:
            continue
        s = exp(sum(frozen.logprobs[t] - old(b, frozen, t) for t in row.tokens) / len(row.tokens))
        for t in row.tokens:
            a, s_t = b.advantages[t], s * math.exp(output.logprobs[t] - frozen.logprobs[t])
            out[t] = -min(s_t * a, clip(s_t, 1 - low, 1 + high) * a)
    return out


def cispo(b: Plain, output: PlainOutput, frozen: PlainOutput, high: float = 4.0) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        weight = clip(ratio(b, frozen, frozen, t), 0, 1 + high)
        out[t] = -weight * b.advantages[t] * output.logprobs[t]
    return out


def reinforce(b: Plain, output: PlainOutput, frozen: PlainOutput) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        out[t] = -b.advantages[t] * output.logprobs[t]
    return out


def sapo(b: Plain, output: PlainOutput, frozen: PlainOutput, positive: float = 1.0, negative: float = 1.05) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        a, rho = b.advantages[t], ratio(b, output, frozen, t)
        tau = positive if a > 0 else negative
        out[t] = -a * (4 / tau) / (1 + math.exp(-tau * (rho - 1)))
    return out


def dppo(
    b: Plain,
    output: PlainOutput,
    frozen: PlainOutput,
    divergence: str = "tv",
    low: float = 0.15,
    high: float = 0.15,
    cap: float = 20.0,
) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        a, p, mu = b.advantages[t], math.exp(frozen.logprobs[t]), math.exp(b.rollout_logprobs[t])
        apart = abs(p - mu)
        if divergence == "kl":
            apart = mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu) / (1 - p))
        if (a > 0 and p > mu and apart > high) or (a < 0 and p < mu and apart > low):
            continue
        out[t] = -min(p / mu, cap) * a * output.logprobs[t]
    return out


def gmpo(b: Plain, output: PlainOutput, frozen: PlainOutput, low: float = 0.4, high: float = 0.4) -> Values:
    out = [0.0] * b.length
    for row in b.rows:
        product = 1.0
        for t in row.tokens:
            rho = ratio(b, output, frozen, t)
            product *= min(rho, math.exp(high)) if b.advantages[t] > 0 else max(rho, math.exp(-low))
        for t in row.tokens:
            out[t] = -b.advantages[t] * product ** (1 / len(row.tokens))
    return out


def kl_cov(b: Plain, output: PlainOutput, frozen: PlainOutput, coefficient: float = 1.0) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        out[t] = -b.advantages[t] * ratio(b, output, frozen, t)
        if b.high_covariance[t]:
            out[t] += coefficient * abs(output.logprobs[t] - old(b, frozen, t))
    return out


def kl(
    b: Plain,
    output: PlainOutput,
    frozen: PlainOutput,
    coefficient: float = 0.01,
    estimator: str = "k3",
    log_ratio_clamp: float = 20.0,
    output_clamp: float = 10.0,
    unbiased: bool = False,
) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        e = clip(b.reference_logprobs[t] - output.logprobs[t], -log_ratio_clamp, log_ratio_clamp)
        value = {"k1": -e, "k2": e * e / 2, "k3": math.exp(e) - 1 - e}[estimator]
        value = clip(value, -output_clamp, output_clamp)
        if unbiased:
            value *= ratio(b, output, frozen, t)
        out[t] = coefficient * value
    return out


def tis(b: Plain, frozen: PlainOutput, cap: float = 2.0) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        out[t] = min(exp(old(b, frozen, t) - b.rollout_logprobs[t]), cap)
    return out


def icepop(b: Plain, frozen: PlainOutput, low: float = 0.5, high: float = 5.0) -> Values:
    out = [0.0] * b.length
    for t in b.trained:
        w = exp(old(b, frozen, t) - b.rollout_logprobs[t])
        out[t] = w if low <= w <= high else 0.0
    return out


def sequence_mask(b: Plain, frozen: PlainOutput, low: float = 0.98, high: float = 1.02) -> Values:
    out = [0.0] * b.length
    for row in b.rows:
        d = {t: old(b, frozen, t) - b.rollout_logprobs[t] for t in row.tokens}
        if d and low <= exp(sum(d.values()) / len(d)) <= high:
            for t in row.tokens:
                out[t] = exp(d[t])
    return out


def composite(
    b: Plain,
    output: PlainOutput,
    frozen: PlainOutput,
    surrogate: Values,
    correction: Values | None = None,
    kl_term: Values | None = None,
    entropy: float = 0.0,
    nll: float = 0.0,
    threshold: float = 0.0,
) -> Values:
    out = [0.0] * b.length
    for row in b.rows:
        for t in row.tokens:
            out[t] = surrogate[t] * (1.0 if correction is None else correction[t])
            if kl_term is not None:
                out[t] += kl_term[t]
            if entropy:
                out[t] -= entropy * output.entropy[t]
            if row.reward > threshold:
                out[t] -= nll * output.logprobs[t]
    return out


def mismatch(b: Plain, frozen: PlainOutput) -> dict[str, float]:
    d = {t: old(b, frozen, t) - b.rollout_logprobs[t] for t in b.trained}
    per_row = [math.exp(sum(abs(d[t]) for t in r.tokens) / len(r.tokens)) for r in b.rows if r.tokens]
    return {
        "mismatch/token_mult_prob_error": sum(math.exp(abs(x)) for x in d.values()) / len(d),
        "mismatch/kl": sum(math.exp(x) - 1 - x for x in d.values()) / len(d),
        "mismatch/max": max(abs(x) for x in d.values()),
        "mismatch/sequence": sum(per_row) / len(per_row),
        "mismatch/sequence_max": max(per_row),
    }
