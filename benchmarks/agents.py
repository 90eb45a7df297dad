"""What episodes of several turns cost, beside the same without what saves it. Prints one line for each measurement.

    python benchmarks/agents.py [--parts generator] [--model FOLDER] [--vllm] [--small] [--json FILE]

generator: the 8 episodes of a group, of 8 turns each; the next prompt is the last one, its answer of 32 random tokens
and an observation of 32. Tokens of prompts that were laid out and computed, and seconds, with known beginnings shared
and, of each prompt, all computed anew. With ``--vllm`` also on vLLM, in the interpreter that it is installed in.

Without ``--model`` the model has the shape of SmolLM2-135M and random weights: the time is the same.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe
from refit import Listed
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from whet.generators.base import Refittable, SamplingParams
from whet.generators.engine_model import build_engine_model
from whet.generators.torch_config import TorchGeneratorConfig
from whet.generators.torch_generator import TorchGenerator
from whet.generators.vllm_config import VllmGeneratorConfig
from whet.processes.compute import compute_now
from whet.processes.malloc import keep_freed_memory
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

GROUP, PROMPT = 8, 200
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
SMALL = {"hidden_size": 288, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
Result = dict[str, float]


def load(folder: str | None, small: bool) -> PreTrainedModel:
    """The model in bfloat16: that of a folder, or one with random weights."""
    torch.manual_seed(0)
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = LlamaConfig(**(SMALL if small else SHAPE), **HEADS, max_position_embeddings=8192)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


async def episodes(generator: Refittable[Any], shares: bool, turns: int, tokens: int) -> None:
    """Play one group: each episode goes on as soon as its own answer is there. Where nothing is to be shared, each has
    a prompt of its own."""
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(10, 500, (PROMPT,), generator=draw).tolist()

    async def one(number: int) -> None:
        history = [prompt[0] if shares else number, *prompt[1:]]
        for turn in range(turns):
            params = SamplingParams(tokens, seed=number * turns + turn)
            completion = await generator.sample(history, params, f"episode {number}")
            observation = torch.randint(10, 500, (tokens,), generator=draw).tolist()
            history += completion.tokens + observation

    await asyncio.gather(*map(one, range(GROUP)))


async def measure(generator: Refittable[Any], shares: bool, turns: int, tokens: int) -> Result:
    """The seconds of a group, after a warm-up, and what became of its prompts' tokens."""
    await episodes(generator, shares, 1, 2)
    await generator.pause()
    await generator.resume(1)  # what the warm-up left is forgotten
    generator.tally()
    started, computing = time.perf_counter(), time.process_time()
    await episodes(generator, shares, turns, tokens)
    seconds, computing = time.perf_counter() - started, time.process_time() - computing
    told = generator.tally().result()
    laid_out = told["time/generator/prompt_tokens"]
    computed = laid_out * (1 - told["time/generator/cached_share"])
    times = {"seconds": seconds, "seconds of processors, in this process": computing}
    return times | {"laid out": laid_out, "computed": round(computed), "sampled": GROUP * turns * tokens}


async def on_torch(model: PreTrainedModel, shares: bool, turns: int, tokens: int) -> Result:
    def build() -> TorchGenerator:
        config = TorchGeneratorConfig(max_batch=GROUP, prefix_tokens=65536 if shares else 0)
        return TorchGenerator(config, build_engine_model(model.config, model.state_dict(), torch.bfloat16))

    generator = compute_now(build)
    try:
        return await measure(generator, shares, turns, tokens)
    finally:
        await generator.close()


async def on_vllm(model: PreTrainedModel, shares: bool, turns: int, tokens: int) -> Result:
    config = VllmGeneratorConfig(max_batch=GROUP, cache_gib=1.0, prefix_caching=shares)
    generator: Any = config.build(model.config)
    try:
        weights = Listed([(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"])
        await EngineSync(WeightSyncConfig(probe=False), []).load(weights, generator, 0)
        return await measure(generator, shares, turns, tokens)
    finally:
        await generator.close()


def generator_part(args: argparse.Namespace) -> dict[str, Result]:
    """Prefixes shared and computed anew, with each engine."""
    model = compute_now(load, args.model, args.small)
    turns, tokens = (3, 8) if args.small else (8, 32)
    results: dict[str, Result] = {}
    engines = {"torch": on_torch} | ({"vllm": on_vllm} if args.vllm else {})
    for name, run in engines.items():
        for shares in (True, False):
            label = f"generator, {name}, {'beginnings shared' if shares else 'all computed anew'}"
            results[label] = asyncio.run(run(model, shares, turns, tokens))
    return results


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Result]]] = {"generator": generator_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--model", help="a folder; by default a model with random weights")
    parser.add_argument("--vllm", action="store_true", help="on vLLM, too")
    parser.add_argument("--small", action="store_true", help="a tiny model and short episodes: does it run?")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()
    keep_freed_memory()
    results: dict[str, Result] = {}
    for part in args.parts.split(","):
        for label, numbers in PARTS[part](args).items():
            results[label] = numbers
            print(f"{label}: " + ", ".join(f"{name} {value:.6g}" for name, value in numbers.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
