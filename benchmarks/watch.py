"""The time that ``whet watch`` takes to open a long run, from the start of its process: the page, the first event, all
curves, and pages of rollouts. The run folder is made in a temporary folder: about 650 MB for the default sizes.

    python benchmarks/watch.py --steps 100000 --rollouts 10
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from whet.show.metric_catalog import CATALOG, PHASES

_MOST = 2_000_000  # rollouts of the folder
_LIMIT = 60.0  # seconds for an answer


def make_run(folder: Path, steps: int, rollouts: int) -> None:
    """Write the files of a run as training writes them, with ``rollouts`` short answers for each step."""
    if steps * rollouts > _MOST:
        raise SystemExit(f"{steps * rollouts} rollouts are more than {_MOST}: they would fill the disk")
    (folder / "rollouts").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"name: long\nsteps: {steps}\nseed: 1\n")
    names = [entry.key for entry in CATALOG] + [f"time/{name}" for name in (*PHASES, "step", "tokens_per_second")]
    names += [f"scores/score_{i}" for i in range(8)]
    random.seed(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: random.random() + step / steps for name in names}
            line = {"step": step, "kind": "train", **values, "time/written": time.time()}
            file.write(json.dumps(line) + "\n")
            if step % 500 == 0:
                held_out = {"evaluation/accuracy": step / steps, "evaluation/n": 200}
                file.write(json.dumps({"step": step, "kind": "evaluation", **held_out}) + "\n")
    pieces = [" The", " answer", " is", " 4", "."]
    for step in range(1, steps + 1) if rollouts else ():
        with (folder / "rollouts" / f"step-{step:06d}.jsonl").open("w") as file:
            for sample in range(rollouts):
                record = {
                    "step": step, "uid": f"{step}/0", "task": f"sums/{step}", "sample": sample, "prompt": "2 + 2?",
                    "answer": "".join(pieces), "reward": sample % 2, "tokens": list(range(5)), "texts": pieces,
                    "logprobs": [-0.1] * 5, "learner_logprobs": [-0.2] * 5,
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")


def events(url: str) -> Iterator[dict]:
    with urllib.request.urlopen(url, timeout=_LIMIT) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])["runs"][0]


def measure(folder: Path) -> None:
    """Start the command and print the seconds until each answer is there, from the start or from its request."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "whet", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, _, token = process.stdout.readline().strip().partition("?")

            def get(path: str) -> bytes:
                with urllib.request.urlopen(f"{address}{path}{token}", timeout=_LIMIT) as answer:
                    return answer.read()

            def note(what: str, since: float = start) -> None:
                print(f"{what:<44} {time.perf_counter() - since:6.2f} s", flush=True)

            get("?")
            note("the page")
            for number, run in enumerate(events(f"{address}events?{token}")):
                if not number:
                    note(f"the first event, at step {run['step']:,}")
                if run["read"] == 1:
                    break
            charts = get("charts?")
            first = get("rollouts?")
            note(f"all {run['step']:,} steps drawn, and rollouts")
            used = psutil.Process(process.pid).cpu_times()
            print(f"  of which the server computed for {used.user + used.system:.2f} s")
            print(f"  charts {len(charts) / 1e3:.0f} kB, rollouts {len(first) / 1e3:.0f} kB")
            for what, path in (
                ("zoom into 1,000 steps", "charts?low=1000&high=2000&"),
                ("rollouts of one step, sorted", "rollouts?step=500&sort=reward&"),
                ("a task in the middle", "rollouts?step=50000&text=sums/50000&"),
                ("text that is nowhere (stops after 2 s)", "rollouts?text=nowhere&"),
            ):
                began = time.perf_counter()
                note_text = json.loads(get(path)).get("note", "")
                note(what + (f": {note_text}" if note_text else ""), began)
            memory = psutil.Process(process.pid).memory_info().rss
            print(f"memory {memory / 2**20:,.0f} MiB")
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rollouts", type=int, default=10, help="of each step")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "long"
        make_run(folder, asked.steps, asked.rollouts)
        size = sum(path.stat().st_size for path in folder.rglob("*.jsonl")) / 1e6
        print(f"{asked.steps:,} steps, {asked.steps * asked.rollouts:,} rollouts, {size:,.0f} MB")
        measure(folder)


if __name__ == "__main__":
    main()
