"""The balance of replicas behind the router, counted without an engine: requests of long and short prompts mixed.

    python benchmarks/routing.py [--replicas 4] [--prompts 48] [--steps 10] [--weights 1,2,4,8,16]

A step has 48 prompts with 8 samples each, which begin at once. A prompt has 50 to 400 tokens after a system prompt of
64, and each fourth one 2,000 to 8,000 more; completions have 20 to 2,000 tokens, 300 on average. Each episode has a
second turn, with its history and 100 new tokens, which begins when its first turn ends. Weights change after each step.

Prints for each policy the tokens that the busiest replica computed and sampled, over the mean of all replicas, and
the share of prompt tokens that had to be computed; both are means of the steps. The policy ``requests`` keeps an
episode and the samples of a prompt on one replica, unless it has 16 more requests in flight than the least busy one,
and chooses the replica with the fewest requests otherwise.
"""

import argparse
import heapq
import random
from typing import Any, Protocol

from whet.engines.placement import CachedTexts, Place, Placement, beginnings

SAMPLES, LIMIT, OBSERVATION = 8, 2000, 100


class Policy(Protocol):
    """The methods of ``Placement`` that are counted."""

    def begin(self, serving: set[int], prompt: list[int], limit: int) -> Place: ...
    def answered(self, place: Place, prompt: list[int], tokens: list[int]) -> None: ...
    def end(self, place: Place) -> None: ...
    def clear(self) -> None: ...


class ByRequests:
    """The policy ``requests``."""

    def __init__(self, replicas: int, slack: int = 16) -> None:
        self.load, self.slack = [0] * replicas, slack
        self.places: dict[tuple[int, ...], int] = {}

    def begin(self, serving: set[int], prompt: list[int], limit: int) -> Place:
        idle = min(sorted(serving), key=self.load.__getitem__)
        number = self.places.get(tuple(prompt), self.places.get(tuple(prompt[:-OBSERVATION]), idle))
        if self.load[number] - self.load[idle] >= self.slack:
            number = idle
        self.places.setdefault(tuple(prompt), number)
        self.load[number] += 1
        return Place(number, 1)

    def answered(self, place: Place, prompt: list[int], tokens: list[int]) -> None:
        self.places[*prompt, *tokens] = place.number

    def end(self, place: Place) -> None:
        self.load[place.number] -= 1

    def clear(self) -> None:
        self.places.clear()


def step(policy: Policy, replicas: int, prompts: int, seed: int) -> tuple[float, float]:
    """Play one step. Return the busiest replica's tokens over the mean, and the share of prompt tokens computed."""
    rng = random.Random(seed)
    work, computed, total = [0] * replicas, 0, 0
    caches = CachedTexts(replicas)
    running: list[tuple[int, int, Place, list[int], list[int], int]] = []

    def begin(prompt: list[int], tokens: list[int], turns: int, now: int) -> None:
        nonlocal computed, total
        place, ends = policy.begin(set(range(replicas)), prompt, LIMIT), beginnings(prompt)
        cached = (length for length, others in caches.longest(ends) if others >> place.number & 1)
        missing = len(prompt) - next(cached, 0)
        caches.add(place.number, ends)
        computed, total = computed + missing, total + len(prompt)
        work[place.number] += missing + len(tokens)
        heapq.heappush(running, (now + len(tokens), total, place, prompt, tokens, turns))

    def reply() -> list[int]:
        return [rng.randrange(1000) for _ in range(min(LIMIT, 20 + int(rng.expovariate(1 / 280))))]

    for index in range(prompts):
        length = rng.randint(50, 400) + (rng.randint(2000, 8000) if index % 4 == 0 else 0)
        prompt = [*range(64), *(rng.randrange(1000) for _ in range(length))]
        for _ in range(SAMPLES):
            begin(prompt, reply(), 1, 0)
    while running:
        now, _, place, prompt, tokens, turns = heapq.heappop(running)
        policy.end(place)
        policy.answered(place, prompt, tokens)
        caches.add(place.number, beginnings(prompt + tokens))
        if turns < 2:
            history = [*prompt, *tokens, *(rng.randrange(1000) for _ in range(OBSERVATION))]
            begin(history, reply(), turns + 1, now)
    policy.clear()
    return max(work) * replicas / sum(work), computed / total


def means(policy: Policy, replicas: int = 4, prompts: int = 48, steps: int = 10) -> tuple[float, float]:
    """Return the means of both counts over several steps."""
    counts = [step(policy, replicas, prompts, seed) for seed in range(steps)]
    return sum(busiest for busiest, _ in counts) / steps, sum(share for _, share in counts) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--weights", default="1,2,4,8,16")
    given = parser.parse_args()
    policies: dict[str, Any] = {"requests": ByRequests(given.replicas)}
    policies |= {f"prefix_weight={w}": Placement(given.replicas, float(w)) for w in given.weights.split(",")}
    for name, policy in policies.items():
        busiest, share = means(policy, given.replicas, given.prompts, given.steps)
        print(f"{name:18} busiest replica {busiest:.2f} x the mean, {share:.1%} of prompt tokens computed")


if __name__ == "__main__":
    main()
