"""The speed of the machine, and the operations that the mathematics needs: ceilings for benchmarks."""

import argparse
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from whet.models.precision import choose_precision, multiplies_bfloat16
from whet.models.rates import fastest_matmul_precision


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The fastest of a few; on one thread in processor time, so that other programs don't count."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    work()
    taken = []
    for _ in range(repeats):
        started = clock()
        work()
        taken.append(clock() - started)
    return min(taken)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """The option in which precision whet's parts, their ceilings and their rivals compute."""
    text = "by default the one that a run would choose here"
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto", help=text)


def chosen_dtype(precision: str, model: str | None = None) -> torch.dtype:
    """The precision of ``add_precision``, for the model of a folder or else of SmolLM2-135M's shapes."""
    config = None if model is None else AutoConfig.from_pretrained(model)
    name = choose_precision(config, "cpu").precision if precision == "auto" else precision
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def product_rate(m: int, k: int, n: int, dtype: torch.dtype, repeats: int = 5) -> float:
    """GFLOP/s of a product [m, k] x [k, n], in float32 by the faster of torch's two libraries."""
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    if dtype == torch.float32:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(fastest_matmul_precision())
        try:
            return 2e-9 * m * k * n / seconds(lambda: a @ b.T, repeats)
        finally:
            torch.set_float32_matmul_precision(before)
    return 2e-9 * m * k * n / seconds(lambda: a @ b.T, repeats)


def copy_rate(megabytes: int = 512, repeats: int = 5) -> float:
    """GB/s of memory, read and written together, by copying a tensor that fits no cache."""
    source = torch.zeros(megabytes << 18, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2e-9 * source.nbytes / seconds(lambda: target.copy_(source), repeats)


def forward_flops(model: PreTrainedModel, tokens: int, heads: int, pairs: float) -> float:
    """Products of a forward pass over ``tokens`` tokens, of which ``heads`` go through the vocabulary head, with
    ``pairs`` query-key pairs in each layer and head."""
    config = model.config
    embedding = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.get_decoder().parameters()) - embedding
    attention = 4 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return float(2 * body * tokens + 2 * embedding * heads) + attention


def describe() -> dict[str, str | int]:
    """The machine in words, and today's date."""
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in facts.splitlines() if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(names),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": "yes" if multiplies_bfloat16() else "emulated",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
