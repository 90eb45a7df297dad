"""The time of a learner's optimizer step, by layout of ranks, compared with one process that has as many cores in all.

    python benchmarks/parallel.py [parallel.fsdp=2 parallel.tensor=2,parallel.sequence_parallel=false ...] [--json FILE]

Each layout is a learner in processes of this machine with the cores divided among its ranks; it updates SmolLM2-135M on
the same batch of shared prompts. Layout and one process take turns, so that a busy minute hits both.
Read the ratios: what ranks cost or gain where nothing is added but their talking.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import torch
from learning import grpo_batch
from machine import add_precision, chosen_dtype, describe

from whet.base.errors import ConfigError, WhetError
from whet.cluster.processes import ProcessCluster
from whet.config import load
from whet.core.batch import Batch
from whet.learner.config import LearnerConfig, Precision, WorkerConfig
from whet.learner.learner import WorkerLearner
from whet.learner.optimizer_config import OptimizerConfig
from whet.losses.sft import SFTLoss
from whet.models.config import ModelConfig
from whet.parallel.config import ParallelConfig
from whet.run.recipe import Recipe

ALONE = "one process"
LAYOUTS = ["parallel.fsdp=2", "parallel.context=2", "parallel.pipeline=2"]  # 9 heads can't be cut in two


def sizes_of(layout: str) -> ParallelConfig:
    """Of overrides as a recipe takes them, joined by commas."""
    overrides = [] if layout == ALONE else layout.split(",")
    try:
        return load(Recipe, "quickstart", ["cluster=processes", *overrides]).value.parallel
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


async def measure(
    layout: str, batch: Batch, rounds: int, max_tokens: int, precision: Precision
) -> dict[str, list[float]]:
    """Seconds of each step, of one process and of the layout."""
    cluster, learners = ProcessCluster(), {}
    taken: dict[str, list[float]] = {ALONE: [], layout: []}
    try:
        for name in taken:
            config = WorkerConfig(
                model=ModelConfig(),
                learner=LearnerConfig(precision=precision, max_tokens=max_tokens),
                parallel=sizes_of(name),
                optimizer=OptimizerConfig(),
                steps=1000,
            )
            learners[name] = await WorkerLearner.launch(cluster, config)
            await learners[name].update(batch, SFTLoss())  # the first step allocates
        for _ in range(rounds):
            for name, learner in learners.items():
                started = time.perf_counter()
                await learner.update(batch, SFTLoss())
                taken[name].append(time.perf_counter() - started)
    finally:
        for learner in learners.values():
            await learner.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"by default {' '.join(LAYOUTS)}")
    add_precision(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()
    precision: Precision = "float32" if chosen_dtype(args.precision) == torch.float32 else "bfloat16"
    torch.set_num_threads(1)  # this process only waits

    ranks = {layout: sizes_of(layout).ranks for layout in args.layouts or LAYOUTS}
    batch, results = grpo_batch(args.prompts, args.answers, share=True).weigh("token"), {}
    print(f"{len(batch)} tokens a step, {int(batch.trained.sum())} of them trained; micro-batches of {args.max_tokens}")
    for layout, size in ranks.items():
        try:
            results[layout] = asyncio.run(measure(layout, batch, args.rounds, args.max_tokens, precision))
        except WhetError as error:
            raise SystemExit(f"error: {layout}: {error}") from None
        alone, median = (statistics.median(taken) for taken in results[layout].values())
        compared = f"{median:7.2f} s a step, {median / alone:4.2f} times one process ({alone:.2f} s)"
        print(f"{layout:36} {size} ranks {compared}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "seconds": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
