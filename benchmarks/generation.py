"""Tokens per second of the in-process generator beside ``transformers.generate``, on the same weights, in one run.

    python benchmarks/generation.py --model FOLDER [--prompts 8 --samples 8 --prompt-tokens 100 --new-tokens 128]

Contestants take turns, so that a busy machine slows all of them; the ratio is what to read. Prints also the rate of the
matrix products alone (the ceiling) and where the generator's time goes.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from whet.generators.base import SamplingParams
from whet.generators.engine_model import build_engine_model
from whet.generators.torch_config import TorchGeneratorConfig
from whet.generators.torch_generator import TorchGenerator


def ours(generator: TorchGenerator, prompts: list[list[int]], samples: int, new: int) -> None:
    async def body() -> None:
        await generator.pause()
        await generator.resume(generator.version + 1)  # prompts are computed anew, as with fresh weights
        requests = [(prompt, i) for prompt in prompts for i in range(samples)]
        await asyncio.gather(*(generator.sample(p, SamplingParams(new, seed=i), "") for p, i in requests))

    asyncio.run(body())


@torch.no_grad()
def theirs(model: PreTrainedModel, prompts: list[list[int]], samples: int, new: int) -> None:
    ids = torch.tensor(prompts).repeat_interleave(samples, 0)
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    model.generate(ids, attention_mask=mask, **options)


@torch.no_grad()
def products(generator: TorchGenerator, rows: int) -> tuple[float, float]:
    """Seconds per decode step spent in linear layers alone, and their GFLOP/s."""
    model = generator.engine.model
    groups = [
        (p.linears, torch.randn(1, rows, p.linears[0].in_features, dtype=model.dtype))
        for p in generator.engine.products
    ]
    flops = sum(2 * rows * linear.weight.numel() for linears, _ in groups for linear in linears)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        for linears, x in groups:
            for linear in linears:
                linear(x)
        best = min(best, time.perf_counter() - started)
    return best, flops / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", default="eager,sdpa", help="attention of transformers.generate; empty for none")
    args = parser.parse_args()

    torch.manual_seed(0)
    rivals = [name for name in args.against.split(",") if name]
    models = {
        name: AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation=name).eval()
        for name in rivals or ["eager"]
    }
    first = next(iter(models.values()))
    engine = build_engine_model(first.config, first.state_dict(), torch.bfloat16)
    rows = args.prompts * args.samples
    generator = TorchGenerator(TorchGeneratorConfig(max_batch=rows), engine)
    prompts = torch.randint(10, first.config.vocab_size, (args.prompts, args.prompt_tokens)).tolist()

    contestants: dict[str, Callable[[int], None]] = {"whet": lambda new: ours(generator, prompts, args.samples, new)}
    for name in rivals:
        contestants[f"generate ({name})"] = lambda new, m=models[name]: theirs(m, prompts, args.samples, new)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run(4)  # warm up
    before = generator.counters.copy()
    for _ in range(args.rounds):
        for name, run in contestants.items():
            started = time.perf_counter()
            run(args.new_tokens)
            seconds[name].append(time.perf_counter() - started)
    spent = generator.counters.since(before)

    tokens = rows * args.new_tokens
    mine = statistics.median(seconds["whet"])
    print(
        f"{rows} sequences ({args.prompts} prompts of {args.prompt_tokens} tokens), {args.new_tokens} new tokens each"
    )
    for name, times in seconds.items():
        median, fastest = statistics.median(times), min(times)
        ratio = "" if name == "whet" else f"   whet is {median / mine:.1f} times as fast"
        print(f"{name:18} {tokens / median:7.0f} tokens/s median, {tokens / fastest:7.0f} best{ratio}")
    step, rate = products(generator, rows)
    steps = spent.decode_steps
    print(
        f"linear layers alone: {1e3 * step:.0f} ms per step ({rate:.0f} GFLOP/s), so at most {rows / step:.0f} tokens/s"
    )
    print(
        f"per step: model {1e3 * spent.decode_seconds / steps:.0f} ms, "
        f"sampling {1e3 * spent.sampling_seconds / steps:.1f} ms; "
        f"prompts: {spent.prefill_seconds / args.rounds:.2f} s of {mine:.2f} s"
    )
    asyncio.run(generator.close())


if __name__ == "__main__":
    main()
