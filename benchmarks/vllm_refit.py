"""Refits of a vLLM engine while LoRA is trained: merged weights each time, beside the adapter alone (``weights.lora``).

    python benchmarks/vllm_refit.py [--model FOLDER] [--rank 16] [--rounds 5] [--json FILE]

SmolLM2-135M in bfloat16, all proofs on, one learner and one engine after the other in one run; before each refit a
step is learned, so that there is something new. Also what the adapter costs afterwards: tokens per second of sampling,
where the engine computes with merged matrices and where it computes W x + s B A x. Needs vLLM (docs/vllm.md).
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe

from whet.batch import Batch
from whet.build import build_generator, build_learner, build_renderer, build_sync
from whet.config import load
from whet.generators.base import SamplingParams
from whet.losses.composite import PolicyLoss
from whet.recipe import Recipe
from whet.types import Group, Span, Task, Trajectory


async def learn(learner: Any, seed: int) -> None:
    """One optimizer step on 64 tokens."""
    tokens = torch.randint(0, 40000, (80,), generator=torch.Generator().manual_seed(seed)).tolist()
    spans = [Span(tokens[:16], False), Span(tokens[16:], True, [-5.0] * 64)]
    batch = Batch.from_groups([Group("g", Task("t", []), [Trajectory(spans)])]).weigh("token")
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
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        recipes = {
            how: load(Recipe, "quickstart", [*base, f"weights.lora={how}"]).value for how in ("merged", "adapter")
        }
        recipe = recipes["merged"]
        learner = await build_learner(recipe, Path(scratch), recipe.cluster.build())
        renderer = build_renderer(recipe)
        text = renderer.render_prompt(
            [{"role": "user", "content": "How much is seven times eight, and why is that so?"}]
        )
        for how, recipe in recipes.items():
            generator = build_generator(recipe, renderer)
            sync = build_sync(recipe, generator, text)
            try:
                refits = []
                for version in range(args.rounds + 1):
                    await learn(learner, version)
                    refits.append((await sync.publish(learner, generator, version)).result())
                    print(how, {name: round(value, 5) for name, value in refits[-1].items()}, flush=True)
                await sample(generator, text, 8)
                rate = await sample(generator, text, args.new)
            finally:
                await generator.close()
            found[how] = {"refits": refits, "tokens_per_second": rate}
        await learner.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; by default the built-in model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="refits after the first one, which starts the engine")
    parser.add_argument("--new", type=int, default=64, help="tokens of each sampled completion")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()

    found = asyncio.run(measure(args))
    for how, numbers in found.items():
        later = [refit["refit/seconds"] for refit in numbers["refits"][1:]]
        size, rate = numbers["refits"][-1]["refit/gigabytes"] * 1e3, numbers["tokens_per_second"]
        seconds = f"{statistics.median(later):.2f} s ({min(later):.2f} to {max(later):.2f})"
        print(f"{how:8} {seconds} and {size:.1f} MB a refit, sampling {rate:.0f} tokens/s")
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "refits": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
