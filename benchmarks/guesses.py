"""Tokens per second of the built-in generator with guessed tokens (``generator.speculative``) and without.

    python benchmarks/guesses.py [--model FOLDER] [--flight 1,8,64] [--new-tokens 128] [--rounds 3] [--json FILE]

Questions of the quickstart, at temperature 1 and greedily, with 1, 8 and 64 answers in flight, each up to its end of
text. Both contestants have the same weights and requests and take turns, and their tokens must be equal. On one thread,
seconds are the processor's, so that other programs don't count; the ratio is what to read. Prints also the steps of
decoding, and how many guesses were made and kept.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import torch
from machine import add_precision, chosen_dtype, describe
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from whet.chat.renderer import Renderer
from whet.config import load
from whet.engines.base import SamplingParams
from whet.engines.config import NGram
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.decoder import Counters
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.loading import build_engine_model
from whet.fetch.model import fetch_model
from whet.fetch.smollm2 import NAME
from whet.processes.compute import compute_now
from whet.run.recipe import Recipe
from whet.tasks.base import TaskSet

NAMES = ("with guesses", "without")


def requests_of(folder: Path, count: int, new: int, greedy: bool) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of the quickstart's first questions with their parameters."""
    data = load(Recipe, "quickstart").value.data
    assert isinstance(data, TaskSet)
    renderer = Renderer(AutoTokenizer.from_pretrained(folder))
    prompts = [renderer.render_prompt(task.prompt) for task in data.tasks("train")[:count]]
    stops = tuple(renderer.stop_token_ids)
    return [(p, SamplingParams(new, seed=i, greedy=greedy, stop_token_ids=stops)) for i, p in enumerate(prompts)]


def engine(model: PreTrainedModel, flight: int, guesses: bool) -> TorchGenerator:
    config = TorchGeneratorConfig(max_batch=flight, speculative=NGram() if guesses else None)
    return TorchGenerator(config, build_engine_model(model.config, model.state_dict(), model.dtype))


async def answers(generator: TorchGenerator, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """Return the tokens of each answer; no prompt is in a cache beforehand, as with fresh weights."""
    await generator.pause()
    await generator.resume(generator.version + 1)
    completions = await asyncio.gather(*(generator.sample(prompt, params, "") for prompt, params in requests))
    return [completion.tokens for completion in completions]


async def compare(
    model: PreTrainedModel, requests: list[tuple[list[int], SamplingParams]], flight: int, rounds: int
) -> dict[str, float]:
    """Return rates, their ratio and what was guessed, over ``rounds`` of both contestants in turns, after a warm-up."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    engines = [compute_now(engine, model, flight, name == NAMES[0]) for name in NAMES]
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    warm = [(prompt, SamplingParams(4)) for prompt, _ in requests[:flight]]
    for generator in engines:
        await answers(generator, warm)
    before = [generator.counters.copy() for generator in engines]
    tokens: list[list[int]] = []
    for _ in range(rounds):
        for name, generator in zip(NAMES, engines, strict=True):
            started = clock()
            answered = await answers(generator, requests)
            seconds[name].append(clock() - started)
            if tokens and answered != tokens:
                raise SystemExit("guesses changed what was sampled")
            tokens = answered
    counters: list[Counters] = [generator.counters.since(old) for generator, old in zip(engines, before, strict=True)]
    for generator in engines:
        await generator.close()
    sampled = sum(map(len, tokens))
    took = {name: statistics.median(times) for name, times in seconds.items()}
    rates = {f"tokens/s {name}": sampled / median for name, median in took.items()}
    steps = {f"steps {name}": c.decode_steps / rounds for name, c in zip(NAMES, counters, strict=True)}
    guessed, kept = counters[0].guessed_tokens / rounds, counters[0].kept_guesses / rounds
    ratio = took["without"] / took["with guesses"]
    return rates | steps | {"ratio": ratio, "tokens": sampled, "guessed": guessed, "kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=NAME)
    add_precision(parser)
    parser.add_argument("--flight", default="1,8,64", help="numbers of answers in flight")
    parser.add_argument("--least", type=int, default=4, help="answers with fewer than these in flight")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()

    folder = fetch_model(args.model)
    dtype = compute_now(chosen_dtype, args.precision, str(folder))
    model = compute_now(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    results = {}
    for flight in map(int, args.flight.split(",")):
        for greedy in (False, True):
            requests = requests_of(folder, max(flight, args.least), args.new_tokens, greedy)
            label = f"{flight} in flight, {'greedy' if greedy else 'temperature 1'}"
            numbers = results[label] = asyncio.run(compare(model, requests, flight, args.rounds))
            print(
                f"{label:30} {numbers['tokens/s with guesses']:6.1f} tokens/s, "
                f"without {numbers['tokens/s without']:6.1f}: {numbers['ratio']:.2f} times; "
                f"{numbers['kept']:.0f} of {numbers['guessed']:.0f} guesses kept, "
                f"{numbers['steps with guesses']:.0f} steps instead of {numbers['steps without']:.0f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "dtype": str(dtype), "results": results}, indent=2))


if __name__ == "__main__":
    main()
