"""Part B of ``gpu.py``: how fast the learner trains, rung by rung of what was done for GPUs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from gpu import Row, Setting, check, seconds, wait, within
from learning import counted_flops
from torch import Tensor, nn

from whet.core.batch import Batch, ModelOutput
from whet.core.types import Episode, Group, Span, Task, Trajectory
from whet.learner.model import LearnerModel
from whet.learner.optimizer import build_optimizer
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.optimizer_state import pieces
from whet.learner.precision import bf16_residual_stream, use_float8
from whet.models import tiled_logprobs
from whet.models.attention.forest import use_forest_attention
from whet.models.compiled import compile_layers

PEAK = 989e12  # of an H100 or H200 in bfloat16, dense


@dataclass(slots=True, frozen=True)
class Shape:
    """A model's sizes, and the MFU that is expected of each rung."""

    hidden: int
    inner: int
    layers: int
    heads: int
    tied: bool
    expected: dict[str, tuple[float, float]]


LADDER = ("as it was", "cudnn off", "tiles", "flex", "varlen", "narrow", "compiled")
SMALL = [(0, 7), (6, 12), (8, 16), (10, 20), (10, 20), (12, 24), (22, 42)]
LARGE = [(5, 30), (28, 40), (30, 44), (33, 48), (33, 48), (36, 52), (42, 60)]
SHAPES = {
    "0.6B": Shape(1024, 3072, 28, 16, True, dict(zip(LADDER, SMALL, strict=True))),
    "8B, 12 layers": Shape(4096, 12288, 12, 32, False, dict(zip(LADDER, LARGE, strict=True))),
}
RUNGS: dict[str, dict[str, bool]] = {
    "as it was": {"cudnn": True, "small tiles": True},
    "cudnn off": {"small tiles": True},
    "tiles": {},
    "flex": {"flex": True},
    "varlen": {"varlen": True},
    "narrow": {"varlen": True, "narrow": True},
    "liger": {"varlen": True, "narrow": True, "liger": True},
    "compiled": {"varlen": True, "narrow": True, "compiled": True},
    "recomputation": {"varlen": True, "narrow": True, "compiled": True, "recomputation": True},
    "float8": {"varlen": True, "narrow": True, "compiled": True, "float8": True},
}
PACKAGES = {"liger": "liger_kernel", "float8": "torchao"}


@check("B1")
def small_model(s: Setting) -> Iterator[Row]:
    """Qwen3-0.6B's shape, 8,192 and 16,384 tokens."""
    for tokens in (s.pick(8192, 64), s.pick(16384, 64))[: 1 if s.small else 2]:
        yield from _ladder("0.6B", tokens, s)


@check("B2")
def large_model(s: Setting) -> Iterator[Row]:
    """Twelve layers of an 8B model, 8,192 tokens."""
    yield from _ladder("8B, 12 layers", s.pick(8192, 64), s)


def _ladder(name: str, tokens: int, s: Setting) -> Iterator[Row]:
    shape = SHAPES[name]
    model, done = _model(shape, s), set[str]()  # what is done stays done for later rungs
    for rung, how in RUNGS.items():
        if s.rungs and rung not in s.rungs:
            continue
        if s.small and how.keys() & {"flex", "compiled", "liger"}:
            continue
        if missing := [what for what in how.keys() & PACKAGES.keys() if find_spec(PACKAGES[what]) is None]:
            yield Row(f"{name}: {rung}", f"skipped: {PACKAGES[missing[0]]} is not installed")
            continue
        if how.get("narrow") and "narrow" not in done:
            bf16_residual_stream(model.model)
        if how.get("compiled") and "compiled" not in done:
            compile_layers(model.model, s.device)
        if how.get("float8"):
            use_float8(model.model, s.device)
        done |= how.keys()
        with _as(model, how, s):
            new = [_step(model, grpo_batch(tokens, seed), s) for seed in range(s.pick(5, 1))]
            same = grpo_batch(tokens, 99)
            again = [_step(model, same, s) for _ in range(s.pick(10, 1))]
            flops = counted_flops(model.model, same)
            for what, laps in (("new shapes", new[s.pick(1, 0) :]), ("one shape", again[s.pick(2, 0) :])):
                forward, backward = (sorted(lap[i] for lap in laps)[len(laps) // 2] for i in (0, 1))
                where = f"{name}, {tokens} tokens, {rung}, {what}"
                yield Row(f"{where}: ms forward, backward", f"{1e3 * forward:.0f}, {1e3 * backward:.0f}")
                yield Row(f"{where}: tokens/s", round(tokens / (forward + backward)))
                mfu, (least, most) = 100 * flops / PEAK / (forward + backward), shape.expected.get(rung, (0, 100))
                ok = None if s.small or what == "one shape" else least <= mfu <= most
                yield Row(f"{where}: MFU %", round(mfu, 1), f"{least:g} to {most:g}", ok)
            if s.device.type == "cuda":
                yield Row(
                    f"{name}, {tokens} tokens, {rung}: peak GiB", round(torch.cuda.max_memory_allocated() / 2**30, 1)
                )
                torch.cuda.reset_peak_memory_stats()
            if s.profile:
                yield from _profiled(model, same, rung, s)


def _model(shape: Shape, s: Setting) -> LearnerModel:
    from transformers import AutoModelForCausalLM, Qwen3Config

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    large = {"hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_hidden_layers": shape.layers}
    sizes = small if s.small else large | {"num_attention_heads": shape.heads}
    keys = {"num_key_value_heads": s.pick(8, 2), "head_dim": s.pick(128, 16), "vocab_size": s.pick(151_936, 300)}
    with s.device:
        whole = AutoModelForCausalLM.from_config(
            Qwen3Config(**sizes, **keys, tie_word_embeddings=shape.tied), dtype=torch.float32
        )
    use_forest_attention(whole)
    model = LearnerModel(whole.train(), None, "bfloat16")
    model.device = s.device
    return model


@contextmanager
def _as(model: LearnerModel, how: dict[str, bool], s: Setting) -> Iterator[None]:
    """Be a rung of the ladder inside."""
    inner: Any = model.model
    sizes = tiled_logprobs.tiles_on
    torch.backends.cuda.enable_cudnn_sdp(how.get("cudnn", False))
    if how.get("small tiles"):
        tiled_logprobs.tiles_on = lambda device: sizes(torch.device("cpu"))
    if how.get("recomputation"):
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")] if how.get("liger") else []
    for norm in norms:
        norm.forward = partial(_liger, norm)  # of this one: its package would patch the generator's as well
    model.attention = "varlen" if how.get("varlen") else "flex" if how.get("flex") else "blocks"
    try:
        yield
    finally:
        tiled_logprobs.tiles_on = sizes
        model.attention = "blocks"
        for norm in norms:
            del norm.forward
        inner.gradient_checkpointing_disable()
        torch.backends.cuda.enable_cudnn_sdp(False)


def _liger(norm: Any, hidden: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    normed: Tensor = LigerRMSNormFunction.apply(hidden, norm.weight, norm.variance_epsilon, 0.0, "llama", False)
    return normed


@check("B3")
def optimizers(s: Setting) -> Iterator[Row]:
    """AdamW's step over 0.6 B numbers, with moments in float32 and in 8 bits."""
    for moments in ("float32", "8bit"):
        if moments == "8bit" and (s.small or find_spec("torchao") is None):
            yield Row("ms, 8bit", "skipped: small, or torchao is not installed")
            continue
        shape = s.pick(1024, 8), s.pick(3072, 8)
        parameters = [nn.Parameter(torch.randn(shape, device=s.device)) for _ in range(s.pick(190, 2))]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = build_optimizer(((str(i), p) for i, p in enumerate(parameters)), OptimizerConfig(moments=moments))
        yield within(f"ms, {moments}", 1e3 * seconds(optimizer.step, s), 2, 15 if moments == "float32" else 60, s)
        moments_bytes = sum(t.nbytes for p in parameters for t in pieces(optimizer.state[p], "").values())
        yield Row(
            f"bytes of moments for a parameter, {moments}", round(moments_bytes / sum(p.numel() for p in parameters), 2)
        )


def grpo_batch(tokens: int, seed: int) -> Batch:
    """Return a batch of about ``tokens`` tokens: prompts of an eighth of 4,096 each, with eight answers of about 192;
    the lengths depend on the seed."""
    random = torch.Generator().manual_seed(seed)
    scale = min(1.0, tokens / 8192)
    prompt, answer = max(2, int(512 * scale)), max(2, int(192 * scale))

    def some(count: int) -> list[int]:
        return torch.randint(10, 250, (count,), generator=random).tolist()

    groups = []
    for index in range(max(1, tokens // (prompt + 8 * answer))):
        lengths = torch.randint(answer * 3 // 4, answer * 5 // 4 + 1, (8,), generator=random).tolist()
        start = some(prompt + seed % 7)
        rows = [Episode([Trajectory([Span(start, False), Span(some(length), True)])]) for length in lengths]
        groups.append(Group(str(index), Task(str(index), []), rows))
    return Batch.from_groups(groups)


def _step(model: LearnerModel, batch: Batch, s: Setting) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass, as the host sees them."""
    model.zero_grad(set_to_none=True)
    wait(s)
    begun = time.perf_counter()
    output: Any = model(batch, frozenset({"logprobs"}))
    loss = _loss(output)
    wait(s)
    ahead = time.perf_counter()
    loss.backward()
    wait(s)
    return ahead - begun, time.perf_counter() - ahead


def _loss(output: ModelOutput) -> Tensor:
    return -output.logprobs.sum() / output.logprobs.numel()


def _profiled(model: LearnerModel, batch: Batch, rung: str, s: Setting) -> Iterator[Row]:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if s.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        _step(model, batch, s)
    by = "self_cuda_time_total" if s.device.type == "cuda" else "self_cpu_time_total"
    yield Row(f"{rung}: what takes longest", profile.key_averages().table(sort_by=by, row_limit=15))
