"""The cost of long and large runs for their controller, against their size. Seconds are seconds of this process's
processors, so that other programs matter little.

    python benchmarks/scale.py [--parts calls,ledger,report,tasks,rows] [--json FILE]

calls: each call of an engine, against the number of episodes at once and of replicas. Stand-in engines answer after a
wait, and compute nothing. A call is a reply of an episode, with all that surrounds it: rendering, tokens of the prompt,
the router's choice, parsing, the environment's step on its thread. A turn waits if the event loop is late: the longest
delay of a clock that ticks in the loop.

ledger: prompts that are drawn, sampled and trained, 128 in a step, each step written to the file; then what a
checkpoint holds of it, and what a resumed run and an audit read.

report: the report of a run with 80 metrics a step.

tasks: a task set that makes its tasks when they are read: the check before the first step, and draws.

rows: rows of a JSONL file for supervised fine-tuning, which are all held.
"""

import argparse
import asyncio
import gc
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from machine import describe
from transformers import AutoTokenizer
from watch import make_run

from whet.chat.renderer import Renderer
from whet.core.types import Message, Task
from whet.data.order import TaskOrder
from whet.data.rows import SupervisedRows
from whet.engines.base import Completion, SamplingParams
from whet.engines.router import Router
from whet.fetch.model import fetch_model
from whet.metrics import Metrics
from whet.processes.machine import collecting_seldom
from whet.rollouts.config import RolloutConfig
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.ledger import FILE, Entry, Ledger, read_ledger
from whet.rollouts.sampling import Sampling
from whet.show.report import write_report
from whet.tasks.base import Environment, Environments, Observation, Step, TaskSet
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.listing import tasks_of

T = TypeVar("T")
GROUP = 16
_TICK = 0.01
_PER_STEP = 128  # prompts


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
        with collecting_seldom():  # as runs do
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


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result and the seconds of a processor."""
    started = time.process_time()
    return work(), time.process_time() - started


def resident() -> float:
    """Return the MiB that this process holds (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def measure_ledger(prompts: int, folder: Path) -> dict[str, float]:
    ledger = Ledger()

    def run() -> None:
        for ticket in range(prompts):
            ledger.dispatched(ticket)
            ledger.finished(ticket)
            step = ticket // _PER_STEP
            ledger.ended(Entry(step, ticket, 0, f"task/{ticket}", step, "filtered" if ticket % 7 == 0 else "trained"))
            if ticket % _PER_STEP == _PER_STEP - 1:
                ledger.write(folder)
        ledger.write(folder)

    _, running = timed(run)
    state, saving = timed(ledger.state)
    again = Ledger()
    _, loading = timed(lambda: again.load_state(state))
    _, comparing = timed(lambda: again.compare(folder))
    entries, reading = timed(lambda: sum(1 for _ in read_ledger(folder)))
    assert entries == prompts
    assert again.marks == ledger.marks
    return {
        "us for each prompt": 1e6 * running / prompts,
        "MB of file": (folder / FILE).stat().st_size / 1e6,
        "kB in a checkpoint": len(state) / 1e3,
        "s to save": saving,
        "s to resume": loading + comparing,
        "s to read": reading,
    }


def measure_report(steps: int, folder: Path) -> dict[str, float]:
    make_run(folder / "run", steps, 0)
    before = resident()
    path, seconds = timed(lambda: write_report(folder / "run"))
    metrics = (folder / "run" / "metrics.jsonl").stat().st_size
    return {
        "MB of metrics": metrics / 1e6,
        "s": seconds,
        "MB of report": path.stat().st_size / 1e6,
        "MiB more": resident() - before,
    }


class Made(Sequence[Task]):
    """Tasks that are made when they are read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]
        if not 0 <= index < self.size:
            raise IndexError(index)
        return Task(f"task/{index}", [{"role": "user", "content": f"What is {index} + {index}?"}], {"answer": index})


class Many(TaskSet):
    count: int

    def tasks(self, split: str) -> Sequence[Task]:
        return Made(self.count)

    async def grade(self, task: Task, answer: str) -> float:
        return 1.0


def measure_tasks(count: int, folder: Path) -> dict[str, float]:
    before = resident()
    tasks, checking = timed(lambda: tasks_of(Many(count=count), "train"))
    order = TaskOrder(len(tasks))
    first, shuffling = timed(lambda: tasks[order.next()])
    drawn, drawing = timed(lambda: [tasks[order.next()].uid for _ in range(min(count - 1, 100_000))])
    assert first.uid not in drawn
    return {
        "s to check": checking,
        "s to shuffle": shuffling,
        "us for each draw": 1e6 * drawing / len(drawn),
        "MiB more": resident() - before,
    }


def measure_rows(count: int, folder: Path) -> dict[str, float]:
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for index in range(count):
            row = {"prompt": f"Question {index}. " + "word " * 60, "completion": f"Answer {index}. " + "word " * 60}
            file.write(json.dumps(row) + "\n")
    before = resident()
    rows, seconds = timed(lambda: SupervisedRows(path=str(path)).split())
    assert len(rows[0]) + len(rows[1]) == count
    return {
        "us for each row": 1e6 * seconds / count,
        "bytes of file for each": path.stat().st_size / count,
        "bytes held for each": 2**20 * (resident() - before) / count,
    }


SIZES: dict[str, tuple[Callable[[int, Path], dict[str, float]], str]] = {
    "ledger": (measure_ledger, "10000,100000,1000000"),
    "report": (measure_report, "1000,10000,100000"),
    "tasks": (measure_tasks, "100000,1000000,10000000"),
    "rows": (measure_rows, "10000,100000"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(("calls", *SIZES)))
    parser.add_argument("--sizes", help="of all parts but calls; by default three for each, up to the largest")
    parser.add_argument("--episodes", default="100,1000,10000", help="at once; rounded down to groups of 16")
    parser.add_argument("--replicas", default="1,256")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each reply")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()
    results = {}

    def note(label: str, numbers: dict[str, float]) -> None:
        results[label] = numbers
        print(f"{label}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()), flush=True)

    parts = args.parts.split(",")
    if "calls" in parts:
        renderer = Renderer(AutoTokenizer.from_pretrained(fetch_model("smollm2-135m-instruct")))
        for replicas in map(int, args.replicas.split(",")):
            for episodes in map(int, args.episodes.split(",")):
                numbers = asyncio.run(measure(renderer, episodes, replicas, args.turns, args.tokens))
                note(f"{episodes} episodes, {replicas} replicas", numbers)
    for part in (part for part in SIZES if part in parts):
        measured, sizes = SIZES[part]
        for size in map(int, (args.sizes or sizes).split(",")):
            with tempfile.TemporaryDirectory() as folder:
                note(f"{part}, {size}", measured(size, Path(folder)))
            gc.collect()
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
