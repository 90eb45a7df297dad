"""One whole GRPO step (sample, learn, publish) of whet and of TRL's ``GRPOTrainer``, on the same model and prompts.

    python benchmarks/grpo_step.py --model FOLDER --trl-python trl-venv/bin/python [--json FILE]

A step is 8 prompts (arithmetic stories, about 85 tokens) with 8 answers of exactly 64 tokens each, learned from in one
optimizer step; all weights are trained. All compute in the precision that a run would choose here, or in --precision;
in bfloat16 whet learns in autocast over float32 weights. TRL (``trl_step.py``, which says how to make its virtual
environment) runs at its defaults, and at the fastest settings that were found for a CPU, OpenMP and malloc
included. All are warmed up, then take turns, so that a busy machine slows all of them, and who waits is stopped; the
ratio is what to read. whet's own seconds are broken down, next to what the machine could do at best: the products that
the mathematics needs at the measured rate of matrix products, and the bytes that must be moved at the measured rate of
copying.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import add_precision, copy_rate, describe, forward_flops, product_rate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from trl_step import reward

from whet.algorithms.grpo import GRPO
from whet.checkpoint.config import CheckpointConfig
from whet.core.batch import Batch
from whet.core.types import Group, Task
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.generator import TorchGenerator
from whet.learner.config import LearnerConfig
from whet.learner.optimizer_config import OptimizerConfig
from whet.models.config import ModelConfig
from whet.processes.compute import compute, run_computing
from whet.rollouts.config import RolloutConfig
from whet.rollouts.sampling import Sampling
from whet.rollouts.source import RolloutSource
from whet.run.evaluation import EvaluationConfig
from whet.run.machine import decide
from whet.run.recipe import Recipe
from whet.run.run import open_run
from whet.run.steps import Lesson, Run
from whet.run.train import train
from whet.tasks.math.arithmetic import Arithmetic

TRL_BEST: dict[str, Any] = {"per_device_train_batch_size": 16, "gradient_checkpointing": False}
# What TRL_BEST's process gets: threads that never sleep, and memory that is kept (as whet keeps its own).
TRL_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "ACTIVE",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


def trl_settings(precision: str, best: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """TRL's defaults and its best settings, in the precision in which whet computes."""
    autocast = {"bf16": precision == "bfloat16"}
    return {
        "defaults": autocast,
        "best": TRL_BEST | autocast | {"model_init_kwargs": {"dtype": precision}} | best,
    }


class Stories(Arithmetic):
    """Stories with the rival's reward, which costs nothing."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return {"reward": reward(answer)}


class TrlProcess:
    """A TRL trainer that makes a step on request, and is stopped meanwhile: its threads may wait by spinning."""

    def __init__(self, command: list[str], settings: dict[str, Any], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [*command, "--settings", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            text=True,
        )

    def step(self, new_tokens: int) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        print(new_tokens, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        self.process.send_signal(signal.SIGSTOP)
        if not answer:
            raise SystemExit("TRL's process ended; its messages are above")
        spent: dict[str, float] = json.loads(answer)
        if spent["new_tokens"] != new_tokens:
            raise SystemExit(f"TRL sampled {spent['new_tokens']} tokens instead of {new_tokens}")
        return spent

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.wait(60)


def source_of(run: Run) -> RolloutSource:
    """Return the source of a run that samples."""
    assert isinstance(run.source, RolloutSource)
    return run.source


def engine_of(run: Run) -> TorchGenerator:
    """Return the engine that a run samples with."""
    engine = source_of(run).player.generator
    assert isinstance(engine, TorchGenerator)
    return engine


class Alternating:
    """A run that, between its steps, notes what the step cost and lets the others have their turn."""

    def __init__(self, run: Run, others: Callable[[int], None]) -> None:
        self._run, self._others = run, others
        self.laps: list[dict[str, float]] = []
        self.batch: Batch | None = None
        self._optimizer = 0.0
        self._counters = engine_of(run).counters.copy()
        register_optimizer_step_pre_hook(lambda *_: self._timed(-1))
        register_optimizer_step_post_hook(lambda *_: self._timed(1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def _timed(self, sign: int) -> None:
        self._optimizer += sign * time.perf_counter()

    async def housekeeping(self, step: int, groups: list[Group], lessons: list[Lesson]) -> None:
        lap = self._run.clock.lap()
        counters = engine_of(self._run).counters
        spent, self._counters = counters.since(self._counters), counters.copy()
        lap |= {"prompts": spent.prefill_seconds, "decoding": spent.decode_seconds, "sampling": spent.sampling_seconds}
        lap |= {"optimizer": self._optimizer, "decode_steps": spent.decode_steps}
        self.laps.append(lap)
        self.batch, self._optimizer = lessons[0].batch, 0.0
        self._others(step)
        self._run.clock.lap()  # the others' time is not counted


def recipe(args: argparse.Namespace) -> Recipe:
    return Recipe(
        steps=1 + args.rounds,
        model=ModelConfig(path=args.model),
        algorithm=GRPO(group_size=args.samples),
        data=Stories(stories=1.0, terms=4, operations="+-*", train_size=args.prompts, test_size=0),
        sampling=Sampling(max_new_tokens=args.new_tokens),
        rollouts=RolloutConfig(prompts_per_step=args.prompts, record_every=0),
        optimizer=OptimizerConfig(lr=1e-6),
        learner=LearnerConfig(precision=args.precision),
        generator=TorchGeneratorConfig(max_batch=args.prompts * args.samples, dtype=args.precision),
        evaluation=EvaluationConfig(enabled=False),
        checkpoints=CheckpointConfig(),
        sinks=(),
    )


def ceilings(run: Run, batch: Batch) -> dict[str, float]:
    """Rates of the machine, and the least seconds that each part of a step could take at those rates."""
    model: Any = engine_of(run).engine.model
    config = model.config
    shapes = [(config.hidden_size, config.intermediate_size), (config.intermediate_size, config.hidden_size)]
    rows, dtype = batch.sequences, model.dtype  # learner and generator compute alike
    rates = {
        "square": product_rate(2048, 2048, 2048, dtype),
        "learning_shapes": max(product_rate(len(batch), k, n, dtype) for k, n in shapes),
        "decoding_shapes": max(product_rate(rows, k, n, dtype) for k, n in shapes),
        "copy": copy_rate(),
    }
    peak, moved = rates["square"] * 1e9, rates["copy"] * 1e9
    trained = int(batch.trained.sum())
    pairs = (batch.position + 1).double()
    learning = 3 * forward_flops(model, len(batch), trained, float(pairs.sum()))
    prompt = ~batch.trained
    groups = int((batch.segment_parent < 0).sum())
    prompts = forward_flops(model, int(prompt.sum()), groups, float(pairs[prompt].sum()))
    decoding = forward_flops(model, trained - rows, trained - rows, float(pairs[batch.trained].sum()))
    parameters = sum(p.numel() for p in model.parameters())
    steps = trained // rows - 1
    return {
        **{f"rate/{name}": rate for name, rate in rates.items()},
        "tflop/learning": learning * 1e-12,
        "tflop/generation": (prompts + decoding) * 1e-12,
        "least/prompts": prompts / peak,
        "least/decoding": max(decoding / peak, steps * dtype.itemsize * parameters / moved),
        "least/learning": learning / peak,
        "least/optimizer": 28 * parameters / moved,  # reads weight, gradient, two moments; writes all but the gradient
        "least/publish": (4 + 5 * dtype.itemsize) * parameters / moved,  # a cast, a copy and two digests
    }


def breakdown(laps: list[dict[str, float]], least: dict[str, float]) -> dict[str, dict[str, float]]:
    """Median seconds of each part of whet's steps, and what it takes at the ceilings."""

    def median(*names: str) -> float:
        return statistics.median(sum(lap.get(name, 0.0) for name in names) for lap in laps)

    generate = median("time/generate", "time/grade")
    engine = {name: median(name) for name in ("prompts", "decoding", "sampling")}
    parts = {
        "prompts": engine["prompts"],
        "decoding": engine["decoding"],
        "sampling": engine["sampling"],
        "rest of generation": generate - sum(engine.values()),
        "learning": median("time/learn") - median("optimizer"),
        "optimizer": median("optimizer"),
        "publish": median("time/publish"),
    }
    return {name: {"seconds": s, "least": least.get(f"least/{name}", 0.0)} for name, s in parts.items()}


def step_seconds(lap: dict[str, float]) -> float:
    return sum(lap.get(f"time/{phase}", 0.0) for phase in ("generate", "grade", "learn", "publish"))


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    decided, decision = await compute(decide, recipe(args))
    args.precision = decision.learner
    settings = trl_settings(args.precision, args.trl_best)
    environments = {"defaults": {}, "best": TRL_ENVIRONMENT if args.trl_environment is None else args.trl_environment}
    rivals: dict[str, TrlProcess] = {}
    theirs: dict[str, list[dict[str, float]]] = {}
    async with open_run(decided, folder, resuming=False) as run:
        prompts = folder / "prompts.json"
        prompts.write_text(json.dumps([task.prompt for task in source_of(run).tasks]))
        if args.trl_python:
            script = str(Path(__file__).with_name("trl_step.py"))
            options = ["--model", args.model, "--prompts", str(prompts), "--samples", str(args.samples)]
            for name in args.against.split(","):
                command = [args.trl_python, script, *options]
                rivals[name] = TrlProcess(command, settings[name], environments[name])
                theirs[name] = []
        run.policy.renderer.stop_token_ids = ()  # every answer has its full length

        def others(step: int) -> None:
            """Step 1 is the warm-up of all."""
            for name, rival in rivals.items():
                spent = rival.step(args.new_tokens if step > 1 else args.warm_up_tokens)
                theirs[name].append(spent)
                print(f"step {step} TRL {name}: {spent['seconds']:.1f} s", flush=True)
            source_of(run).player.sampling = run.recipe.sampling

        source_of(run).player.sampling = run.recipe.sampling.model_copy(update={"max_new_tokens": args.warm_up_tokens})
        alternating = Alternating(run, others)
        try:
            await train(alternating)  # type: ignore[arg-type]
        finally:
            for rival in rivals.values():
                rival.close()
        assert alternating.batch is not None
        laps = alternating.laps[1:]
        least = await compute(ceilings, run, alternating.batch)
        return {
            "machine": await compute(describe),
            "precision": str(decision),
            "settings": {key: value for key, value in vars(args).items() if key not in ("model", "trl_python", "json")},
            "whet": {"seconds": [step_seconds(lap) for lap in laps], "tokens": len(alternating.batch)},
            "trl": {
                name: {"settings": settings[name], "environment": environments[name], "steps": steps[1:]}
                for name, steps in theirs.items()
            },
            "ceilings": least,
            "parts": breakdown(laps, least),
        }


def show(result: dict[str, Any]) -> None:
    machine, least = result["machine"], result["ceilings"]
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"computes in {result['precision']}")
    ours = statistics.median(result["whet"]["seconds"])
    listed = ", ".join(f"{s:.1f}" for s in result["whet"]["seconds"])
    print(f"\nwhet          {ours:7.1f} s a step ({listed})")
    for name, rival in result["trl"].items():
        taken = [step["seconds"] for step in rival["steps"]]
        generating, learning = (
            statistics.median(step["generate"] for step in rival["steps"]),
            statistics.median(step["seconds"] - step["generate"] for step in rival["steps"]),
        )
        listed = ", ".join(f"{s:.1f}" for s in taken)
        print(
            f"TRL, {name:8} {statistics.median(taken):7.1f} s a step ({listed}); generating {generating:.1f} s, "
            f"the rest {learning:.1f} s; whet is {statistics.median(taken) / ours:.1f} times as fast"
        )
    print(
        f"\nmachine: products {least['rate/square']:.0f} GFLOP/s (square), {least['rate/learning_shapes']:.0f} (shapes "
        f"of learning), {least['rate/decoding_shapes']:.0f} (of decoding); copying {least['rate/copy']:.0f} GB/s"
    )
    print(f"needed: {least['tflop/generation']:.2f} TFLOP to generate, {least['tflop/learning']:.2f} to learn")
    print(f"{'':20}{'seconds':>8}{'at best':>9}{'share of ceiling':>18}")
    for name, part in result["parts"].items():
        share = f"{part['least'] / part['seconds']:.0%}" if part["least"] else "-"
        at_best = f"{part['least']:.2f}" if part["least"] else "-"
        print(f"{name:20}{part['seconds']:8.2f}{at_best:>9}{share:>18}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M or another model with a chat template")
    add_precision(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="measured steps")
    parser.add_argument("--warm-up-tokens", type=int, default=64, help="new tokens in the step that is not measured")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL; without it, whet runs alone")
    parser.add_argument("--against", default="defaults,best", help="settings of TRL to run: defaults, best, or both")
    parser.add_argument("--trl-best", type=json.loads, default={}, help="JSON: other settings to try as TRL's best")
    parser.add_argument("--trl-environment", type=json.loads, help="JSON: environment of TRL's best settings")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        result = run_computing(measure(args, Path(folder)))
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
