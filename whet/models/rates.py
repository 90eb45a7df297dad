"""The rates at which a device multiplies matrices of a model's shapes, in float32 and in bfloat16, in GFLOP/s, and the
resulting precision.

On a CPU the rates are per core, by the processor time of one thread, so that other programs don't change the choice,
and in float32 by the faster of torch's two libraries, as learners compute.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from whet.models.layer_heads import largest_heads

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Multiplies = Literal["float32", "bfloat16"]

GAIN = 1.5  # minimum gain of bfloat16; with a smaller one the choice could differ from run to run
_FASTER = 1.25  # minimum gain of "medium" in float32: it is 1.6 on AMD's processors and 1.0 on Intel's
_ACCURACY = 2.0  # how many times the error of "highest" it may have
_BATCHED = 0.1  # share of attention's products in the operations of a small model on short texts
_ROUNDS = 10  # in which both take turns; the fastest counts, so that a pause of the machine changes nothing
_LEAST_ROUNDS = 2  # the first round also initialises kernels
_MOST_WORK = 4e8  # maximum number of operations of a product on a CPU
_ROWS = {"cpu": (64, 512), "cuda": (256, 8192)}  # tokens of a forward pass: decoding, training


@dataclass(frozen=True, slots=True)
class Shapes:
    """The widths of a model's layers. By default SmolLM2-135M's."""

    hidden: int = 576
    inner: int = 1536  # width of a feed-forward layer, or of one expert
    heads: int = 9
    kv_heads: int = 3
    head: int = 64  # width of one head

    @classmethod
    def of(cls, config: "PretrainedConfig") -> Self:
        """Return the shapes in a Hugging Face config."""
        text = config.get_text_config()
        heads = largest_heads(text)
        inner = getattr(text, "intermediate_size", None) or getattr(text, "moe_intermediate_size", None)
        return cls(
            hidden=int(text.hidden_size),
            inner=int(inner) if isinstance(inner, int) else 4 * int(text.hidden_size),
            heads=heads.queries,
            kv_heads=heads.keys,
            head=heads.size,
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """GFLOP/s of a model's linear layers and of its attention's batched products; on a CPU per core."""

    linear_float32: float
    linear_bfloat16: float
    batched_float32: float
    batched_bfloat16: float

    @property
    def gain(self) -> float:
        """The speed of bfloat16 relative to float32, for both kinds of products together; below 1 it is slower."""
        slow = (1 - _BATCHED) / self.linear_float32 + _BATCHED / self.batched_float32
        fast = (1 - _BATCHED) / self.linear_bfloat16 + _BATCHED / self.batched_bfloat16
        return slow / fast

    @property
    def chosen(self) -> Multiplies:
        """The precision to compute in."""
        return "bfloat16" if self.gain >= GAIN else "float32"

    @property
    def emulates(self) -> bool:
        """True if float32 is faster by the same factor, as it is if bfloat16 has no instructions."""
        return self.gain <= 1 / GAIN

    def of(self, precision: Multiplies) -> tuple[float, float]:
        """Return the rates of linear layers and of batched products."""
        if precision == "bfloat16":
            return self.linear_bfloat16, self.batched_bfloat16
        return self.linear_float32, self.batched_float32

    def in_words(self) -> str:
        return (
            f"linear layers {number(self.linear_bfloat16)} GFLOP/s in bfloat16 and {number(self.linear_float32)} in "
            f"float32, batched products {number(self.batched_bfloat16)} and {number(self.batched_float32)}"
        )


def number(rate: float) -> str:
    """Format a rate or a factor with two digits or more."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


@cache
def measure(shapes: Shapes, device: str = "cpu", seconds: float = 0.5) -> Rates:
    """Return the rates, measured once per process for ``seconds`` or a few rounds of all products, whichever is longer.
    The products take turns, and the fastest run of each counts."""
    products = [
        product
        for rows in _ROWS[device]
        for precision in (torch.float32, torch.bfloat16)
        for product in (_linear(shapes, rows, precision, device), _batched(shapes, rows, precision, device))
    ]
    fastest = [float("inf")] * len(products)
    end, rounds = time.perf_counter() + seconds, 0
    with _fastest_float32(device), torch.inference_mode(), torch.autocast(device, enabled=False), _one_thread():
        while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
            for index, product in enumerate(products):
                fastest[index] = min(fastest[index], product.time())
            rounds += 1

    def rate(kind: str, precision: torch.dtype) -> float:
        some = [
            (product.work, took)
            for product, took in zip(products, fastest, strict=True)
            if (product.kind, product.precision) == (kind, precision)
        ]
        return sum(work for work, _ in some) / sum(took for _, took in some) / 1e9

    return Rates(
        rate("linear", torch.float32),
        rate("linear", torch.bfloat16),
        rate("batched", torch.float32),
        rate("batched", torch.bfloat16),
    )


@cache
def fastest_matmul_precision() -> str:
    """Return ``medium`` (torch.set_float32_matmul_precision) if it is clearly faster than ``highest`` in float32 on
    this CPU, else ``highest``; measured once per process in about 0.3 s. The two use different libraries, and which is
    faster depends on the machine. If "medium" rounds to bfloat16, its error shows in the measurement and it is not
    chosen."""
    before, names, layer = torch.get_float32_matmul_precision(), ("highest", "medium"), _layer()
    try:
        rounds = [[_time_float32(name, *layer) for name in names] for _ in range(_ROUNDS)]
        error, rough = (_error_float32(name, *layer) for name in names)
    finally:
        torch.set_float32_matmul_precision(before)
    slow, fast = map(min, zip(*rounds, strict=True))
    return "medium" if fast * _FASTER < slow and rough < _ACCURACY * error else "highest"


def _time_float32(name: str, x: Tensor, weight: Tensor) -> float:
    """Return the seconds of a linear layer, forward and backward."""
    torch.set_float32_matmul_precision(name)
    begun = time.perf_counter()
    result = linear(x, weight)
    torch.autograd.grad(result, [x, weight], result.detach())
    return time.perf_counter() - begun


@torch.no_grad()
def _error_float32(name: str, x: Tensor, weight: Tensor) -> float:
    """Return the relative error of a linear layer for a part of its inputs."""
    torch.set_float32_matmul_precision(name)
    exact = linear(x[:64].double(), weight.double())
    return float((linear(x[:64], weight) - exact).norm() / exact.norm())


def _layer(width: int = 576, inner: int = 1536, rows: int = 512) -> tuple[Tensor, Tensor]:
    """Return the inputs and the weights of a linear layer of a small model."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=random, requires_grad=True)
    return x, torch.randn(inner, width, generator=random, requires_grad=True)


@dataclass(frozen=True, slots=True)
class _Product:
    kind: Literal["linear", "batched"]
    precision: torch.dtype
    device: str
    work: float  # number of multiplications and additions
    run: Callable[[], Tensor]

    def time(self) -> float:
        """Return the seconds of one run."""
        if self.device == "cpu":
            begun = time.thread_time()
            self.run()
            return time.thread_time() - begun
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self.run()
        torch.cuda.synchronize()
        return time.perf_counter() - begun


@contextmanager
def _fastest_float32(device: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if device == "cpu":
        torch.set_float32_matmul_precision(fastest_matmul_precision())
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _linear(shapes: Shapes, rows: int, precision: torch.dtype, device: str) -> _Product:
    """Return the product of a feed-forward layer over the tokens of a forward pass; for a wide model on a CPU, a part
    of it."""
    width, inner = shapes.hidden, shapes.inner
    if device == "cpu":
        width, inner = min(width, 1024), min(inner, 2048)
        rows = min(rows, max(16, int(_MOST_WORK / (2 * width * inner))))
    x, weight = (torch.randn(size, width, device=device).to(precision) for size in (rows, inner))
    return _Product("linear", precision, device, 2.0 * rows * width * inner, partial(linear, x, weight))


def _batched(shapes: Shapes, rows: int, precision: torch.dtype, device: str) -> _Product:
    """Return the product of queries and keys. In decoding, many answers share the keys of their prompt; in training,
    each text has its own keys."""
    most = 4 if device == "cpu" else 64
    kv_heads, group = min(shapes.kv_heads, most), min(max(1, shapes.heads // shapes.kv_heads), most)
    decodes = rows == _ROWS[device][0]
    texts, queries, keys = (rows // 8, 8, 256) if decodes else (rows // 256, 128, 128)
    q = torch.randn(texts * kv_heads, group * queries, shapes.head, device=device).to(precision)
    k = torch.randn(texts * kv_heads, keys, shapes.head, device=device).to(precision)
    work = 2.0 * q.numel() * keys
    return _Product("batched", precision, device, work, partial(torch.bmm, q, k.mT))
