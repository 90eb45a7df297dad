"""The controller's time for each call of an engine, against the number of episodes at once and of replicas: stand-in
engines answer after a wait, and compute nothing.

    python benchmarks/scale.py [--episodes 100,1000,10000] [--replicas 1,256] [--turns 4] [--tokens 64] [--json FILE]

A call is a reply of an episode, with all that surrounds it: rendering, tokens of the prompt, the router's choice,
parsing, the environment's step on its thread. Its seconds are seconds of this process's processors, so that other
programs matter little. A turn waits if the event loop is late: the longest delay of a clock that ticks in the loop.
"""

import argparse
import asyncio
import gc
import json
import resource
import time
from pathlib import Path
from typing import Any

from machine import describe
from transformers import AutoTokenizer

from whet.chat.renderer import Renderer
from whet.core.types import Message, Task
from whet.engines.base import Completion, SamplingParams
from whet.engines.router import Router
from whet.fetch.model import fetch_model
from whet.metrics import Metrics
from whet.rollouts.config import RolloutConfig
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.sampling import Sampling
from whet.tasks.base import Environment, Environments, Observation, Step
from whet.tasks.isolated import IsolatedEnvironments

GROUP = 16
_TICK = 0.01


TOKENS = [1000 + 7 * i % 1000 for i in range(10_000)]


class Waiting:
    """A replica that answers with some tokens after ``seconds``, at no cost."""

    def __init__(self, seconds: float, end: int) -> None:
        self.seconds, self.end = seconds, end

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        await asyncio.sleep(self.seconds * (0.5 + params.seed % 1000 / 1000))
        start, count = params.seed % len(TOKENS) // 2, params.max_new_tokens
        tokens = [*TOKENS[start : start + count - 1], self.end]
        return Completion(tokens, [-1.0] * count, (0, 0), "stop")

    def tally(self) -> Metrics:
        return Metrics()


class Turns(Environment):
    """A conversation of some turns."""

    def __init__(self, task: Task, turns: int) -> None:
        self.task, self.left = task, turns

    async def start(self) -> Observation:
        return Observation(self.task.prompt)

    async def step(self, reply: Message) -> Step:
        self.left -= 1
        return Step(1.0, done=not self.left, messages=[{"role": "user", "content": "Continue with the next part."}])


class Conversations(Environments):
    def __init__(self, turns: int) -> None:
        self.turns = turns

    def make(self, task: Task) -> Environment:
        return Turns(task, self.turns)


async def latest(delays: list[float]) -> None:
    """Record how late each tick of a clock in the event loop is."""
    while True:
        due = time.perf_counter() + _TICK
        await asyncio.sleep(_TICK)
        delays.append(time.perf_counter() - due)


async def measure(renderer: Renderer, episodes: int, replicas: int, turns: int, tokens: int) -> dict[str, float]:
    """Play all episodes at once, each call waiting longer the more there are, as an engine with work would make it."""
    end = renderer.tokenizer.eos_token_id
    engines: list[Any] = [Waiting(max(1.0, episodes / 500), end) for _ in range(replicas)]
    router: Any = Router(engines) if replicas > 1 else engines[0]
    environments = IsolatedEnvironments(Conversations(turns))
    config = RolloutConfig(concurrency=episodes)
    player = GroupPlayer(config, Sampling(max_new_tokens=tokens, max_turns=turns), environments, router, renderer)
    tasks = [Task(f"task/{i}", [{"role": "user", "content": f"Question {i}. " * 20}]) for i in range(episodes // GROUP)]
    delays: list[float] = []
    clock = asyncio.create_task(latest(delays))
    gc.collect()
    started, computing = time.perf_counter(), time.process_time()
    try:
        groups = await asyncio.gather(*(player.play(task, task.uid, GROUP) for task in tasks))
    finally:
        clock.cancel()
        await environments.close()
    computing, passed = time.process_time() - computing, time.perf_counter() - started
    calls = sum(episode.usage.turns for group in groups for episode in group.episodes)
    assert calls == len(tasks) * GROUP * turns
    delays.sort()
    return {
        "ms of a processor for each call": 1000 * computing / calls,
        "calls": calls,
        "seconds": passed,
        "median delay of the loop, ms": 1000 * delays[len(delays) // 2],
        "longest delay, ms": 1000 * delays[-1],
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", default="100,1000,10000", help="at once; rounded down to groups of 16")
    parser.add_argument("--replicas", default="1,256")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each reply")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()
    renderer = Renderer(AutoTokenizer.from_pretrained(fetch_model("smollm2-135m-instruct")))
    results = {}
    for replicas in map(int, args.replicas.split(",")):
        for episodes in map(int, args.episodes.split(",")):
            numbers = asyncio.run(measure(renderer, episodes, replicas, args.turns, args.tokens))
            label = f"{episodes} episodes, {replicas} replicas"
            results[label] = numbers
            print(f"{label}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
