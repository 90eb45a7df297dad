"""Advantages, one sequence and one token at a time, from the formulas. All return [N] lists."""

import math

from tests.reference.plain import Plain, Row

Values = list[float]


def spread(xs: list[float], std: str) -> float:
    mean = math.fsum(xs) / len(xs)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in xs) / (len(xs) - (1 if std == "sample" else 0)))


def normalise(xs: list[float], std: str, eps: float) -> list[float]:
    if len(set(xs)) <= 1:
        return [0.0] * len(xs)
    mean = math.fsum(xs) / len(xs)
    return [(x - mean) / (spread(xs, std) + eps) for x in xs]


def spread_over_tokens(b: Plain, per_row: dict[int, float]) -> Values:
    out = [0.0] * b.length
    for i, row in enumerate(b.rows):
        for t in row.tokens:
            out[t] = per_row[i]
    return out


def members(b: Plain, row: Row) -> list[int]:
    return [i for i, other in enumerate(b.rows) if other.group == row.group]


def group(
    b: Plain, baseline: str = "group_mean", divide: bool = True, std: str = "sample", eps: float = 1e-6
) -> Values:
    per_row = {}
    for i, row in enumerate(b.rows):
        rewards = [b.rows[j].reward for j in members(b, row)]
        if len(set(rewards)) == 1:
            per_row[i] = 0.0
            continue
        if baseline == "group_mean":
            base = math.fsum(rewards) / len(rewards)
        else:
            base = math.fsum(b.rows[j].reward for j in members(b, row) if j != i) / (len(rewards) - 1)
        per_row[i] = (row.reward - base) / (spread(rewards, std) + eps if divide else 1.0)
    return spread_over_tokens(b, per_row)


def whiten_tokens(b: Plain, values: Values, std: str, eps: float) -> Values:
    out = [0.0] * b.length
    for t, value in zip(b.trained, normalise([values[t] for t in b.trained], std, eps), strict=True):
        out[t] = value
    return out


def reinforce_plus_plus(
    b: Plain, baseline: bool = False, penalty: Values | None = None, std: str = "sample", eps: float = 1e-6
) -> Values:
    values = [0.0] * b.length
    for row in b.rows:
        rewards = [b.rows[j].reward for j in members(b, row)]
        mean = math.fsum(rewards) / len(rewards) if len(set(rewards)) > 1 else rewards[0]
        reward = row.reward - (mean if baseline else 0.0)
        for k, t in enumerate(row.tokens):
            values[t] = reward - sum(penalty[u] for u in row.tokens[k:]) if penalty else reward
    return whiten_tokens(b, values, std, eps)


def gdpo(b: Plain, components: dict[str, float], std: str = "sample", eps: float = 1e-6) -> Values:
    totals = [0.0] * len(b.rows)
    for name, weight in components.items():
        for i, row in enumerate(b.rows):
            mates = members(b, row)
            totals[i] += weight * normalise([b.scores[name][j] for j in mates], std, eps)[mates.index(i)]
    return spread_over_tokens(b, dict(enumerate(normalise(totals, std, eps))))


def gae(
    b: Plain,
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float | None = None,
    alpha: float | None = None,
    bootstrap: bool = False,
    whiten: bool = False,
    penalty: Values | None = None,
    std: str = "sample",
    eps: float = 1e-6,
) -> tuple[Values, Values]:
    advantages, returns = [0.0] * b.length, [0.0] * b.length
    for row in b.rows:
        if not row.tokens:
            continue
        policy_lam = lam if alpha is None else max(0.0, 1 - 1 / (alpha * len(row.tokens)))
        for column, decay in ((advantages, policy_lam), (returns, policy_lam if critic_lam is None else critic_lam)):
            last = row.tokens[-1]
            following = b.values[last] if bootstrap and row.truncated else 0.0
            running = 0.0
            for t in reversed(row.tokens):
                reward = (row.reward if t == last else 0.0) - (penalty[t] if penalty else 0.0)
                delta = reward + gamma * following - b.values[t]
                running = delta + gamma * decay * running
                column[t] = running
                following = b.values[t]
        for t in row.tokens:
            returns[t] += b.values[t]
    if whiten:
        advantages = whiten_tokens(b, advantages, std, eps)
    return advantages, returns


def teacher(b: Plain, weight: float = 1.0, clamp: float = 10.0, reward: Values | None = None) -> Values:
    out = list(reward) if reward is not None else [0.0] * b.length
    for t in b.trained:
        gap = b.teacher_token_logprobs[t] - b.old_logprobs[t]
        out[t] += weight * max(-clamp, min(clamp, gap))
    return out


def process_rewards(b: Plain, beta: float = 0.05, gamma: float = 1.0) -> Values:
    """PRIME's equation 5, a token and a partner at a time."""
    out = [0.0] * b.length

    def process(t: int) -> float:
        return beta * (b.reward_logprobs[t] - b.reward_reference_logprobs[t])

    for i, row in enumerate(b.rows):
        partners = [b.rows[j] for j in members(b, row) if j != i]
        rated = [other for other in partners if other.tokens]
        outcome = row.reward - math.fsum(other.reward for other in partners) / len(partners) if partners else 0.0
        means = [math.fsum(process(t) for t in other.tokens) / len(other.tokens) for other in rated]
        for place, t in enumerate(row.tokens):
            to_go = 0.0
            if rated:
                for later, s in enumerate(row.tokens[place:]):
                    to_go += gamma**later * (process(s) - math.fsum(means) / len(means))
            out[t] = to_go + outcome
    return out


def turns(b: Plain, gamma: float = 1.0, divide: bool = True, std: str = "sample", eps: float = 1e-6) -> Values:
    """Each run of trained tokens is a reply; a row without any counts as one. If its replies earned nothing, the whole
    reward comes at the end."""
    out, replies = [0.0] * b.length, [split(row.tokens, b) or [[]] for row in b.rows]
    for i, row in enumerate(b.rows):
        for k, reply in enumerate(replies[i]):
            values = {
                j: gamma ** (len(replies[j]) - 1 - k) * b.rows[j].reward for j in members(b, row) if len(replies[j]) > k
            }
            if len(set(values.values())) > 1:
                mean = math.fsum(values.values()) / len(values)
                value = (values[i] - mean) / (spread(list(values.values()), std) + eps if divide else 1.0)
                for t in reply:
                    out[t] = value
    return out


def split(tokens: list[int], b: Plain) -> list[list[int]]:
    """Consecutive tokens together."""
    runs: list[list[int]] = []
    for t in tokens:
        if runs and runs[-1][-1] == t - 1:
            runs[-1].append(t)
        else:
            runs.append([t])
    return runs


def max_rl(b: Plain, eps: float = 1e-6) -> Values:
    per_row = {}
    for i, row in enumerate(b.rows):
        rewards = [b.rows[j].reward for j in members(b, row)]
        mean = math.fsum(rewards) / len(rewards)
        per_row[i] = 0.0 if len(set(rewards)) == 1 else (row.reward - mean) / (mean + eps)
    return spread_over_tokens(b, per_row)


def covariances(b: Plain, advantages: Values) -> dict[int, float]:
    count = max(1, len(b.trained))
    lp = math.fsum(b.old_logprobs[t] for t in b.trained) / count
    a = math.fsum(advantages[t] for t in b.trained) / count
    return {t: (b.old_logprobs[t] - lp) * (advantages[t] - a) for t in b.trained}


def clip_cov(b: Plain, advantages: Values, low: float = 1.0, high: float = 5.0) -> Values:
    """Every candidate selected."""
    out = list(advantages)
    for t, covariance in covariances(b, advantages).items():
        if low < covariance < high:
            out[t] = 0.0
    return out


def m2po(b: Plain, advantages: Values, threshold: float = 0.04) -> Values:
    """Algorithm 1 of the paper: remove the largest until the mean of the rest is small enough."""
    out = list(advantages)
    d = {t: b.old_logprobs[t] - b.rollout_logprobs[t] for t in b.trained}
    rest = [t for t in d if (advantages[t] > 0 and d[t] > 0) or (advantages[t] < 0 and d[t] < 0)]
    while rest and sum(d[t] ** 2 for t in rest) / len(rest) > threshold:
        worst = max(rest, key=lambda t: d[t] ** 2)
        rest.remove(worst)
        out[worst] = 0.0
    return out
