"""Refits of a vLLM engine while LoRA is trained: merged weights each time, or the adapter alone (``weights.lora``).

    python benchmarks/vllm_refit.py [--model FOLDER] [--rank 16] [--rounds 5] [--json FILE]

SmolLM2-135M in bfloat16, all proofs on, a learner and an engine of each kind in one run, which take turns; before each
refit a step is learned, so that there is something new. Also what the adapter costs afterwards: tokens per second of
sampling, where the engine computes with merged matrices and where it computes W x + s B A x. Needs vLLM
(docs/vllm.md).
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from machine import describe

from whet.config import load
from whet.core.batch import Batch
from whet.core.types import Episode, Group, Span, Task, Trajectory
from whet.engines.base import SamplingParams
from whet.losses.composite import PolicyLoss
from whet.run.build import build_generator, build_learner, build_renderer, build_sync
from whet.run.recipe import Recipe

HOW = ("merged", "adapter")


async def learn(learner: Any, seed: int) -> None:
    """One optimizer step on 64 tokens."""
    tokens = torch.randint(0, 40000, (80,), generator=torch.Generator().manual_seed(seed)).tolist()
    spans = [Span(tokens[:16], False), Span(tokens[16:], True, [-5.0] * 64)]
    batch = Batch.from_groups([Group("g", Task("t", []), [Episode([Trajectory(spans)])])]).weigh("token")
    batch.advantages = batch.trained.double()
    await learner.update(batch, PolicyLoss())


async def sample(generator: Any, prompt: list[int], new: int) -> float:
    """Tokens per second of 32 completions side by side."""
    started = time.perf_counter()
    asked = [generator.sample(prompt, SamplingParams(new, seed=i), str(i)) for i in range(32)]
    made = sum(len(completion.tokens) for completion in await asyncio.gather(*asked))
    return made / (time.perf_counter() - started)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    base = ["generator=vllm", f"model.lora={{rank: {args.rank}}}", "learner.matmul_precision=medium"]
    if args.model:
        base.append(f"model.path={args.model}")
    results: dict[str, Any] = {how: {"refits": [], "tokens_per_second": []} for how in HOW}
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parts = {}
        for how in HOW:
            recipe = load(Recipe, "quickstart", [*base, f"weights.lora={how}"]).value
            learner = await build_learner(recipe, scratch, recipe.cluster.build())
            stack.push_async_callback(learner.close)
            renderer = build_renderer(recipe)
            generator = build_generator(recipe, renderer)
            stack.push_async_callback(generator.close)
            text = renderer.render_prompt([{"role": "user", "content": "How much is seven times eight?"}])
            parts[how] = learner, generator, build_sync(recipe, text)
        for version in range(args.rounds + 1):
            for how, (learner, generator, sync) in parts.items():
                await learn(learner, version)
                refit = (await sync.publish(learner, generator, version)).result()
                results[how]["refits"].append(refit)
                print(how, {name: round(value, 5) for name, value in refit.items()}, flush=True)
        for number in range(args.rounds + 1):
            for how, (_, generator, _) in parts.items():
                rate = await sample(generator, text, args.new)
                results[how]["tokens_per_second"] += [rate] if number else []
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; by default the built-in model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="refits after the first one, which starts the engine")
    parser.add_argument("--new", type=int, default=64, help="tokens of each sampled completion")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()

    results = asyncio.run(measure(args))
    for how, numbers in results.items():
        later = [refit["refit/seconds"] for refit in numbers["refits"][1:]]
        size, rates = numbers["refits"][-1]["refit/gigabytes"] * 1e3, numbers["tokens_per_second"]
        rate = f"{statistics.median(rates):.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f})"
        seconds = f"{statistics.median(later):.2f} s ({min(later):.2f} to {max(later):.2f})"
        print(f"{how:8} {seconds} and {size:.1f} MB a refit, sampling {rate}")
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "refits": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
