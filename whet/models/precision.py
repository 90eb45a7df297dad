"""The precision of a model's computations on a device: the choice behind ``auto``, the modules that autocast covers,
and the facts of a processor that decide whether two machines give bit-identical results."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from whet.models.moe.experts import experts_of
from whet.models.rates import GAIN, Multiplies, Rates, Shapes, measure, number

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NARROW = 256  # hidden size below which products take too small a part of the time to matter


@dataclass(frozen=True, slots=True)
class Choice:
    """The faster precision."""

    precision: Multiplies
    why: str
    emulates: bool = False  # True if bfloat16 would be slower
    rates: Rates | None = None  # None: not measured

    def __str__(self) -> str:
        return f"{self.precision} ({self.why})"


@dataclass(frozen=True, slots=True)
class Instructions:
    """The facts of a machine on which the last digits of a result depend."""

    device: str  # a GPU's name, or "cpu"
    instructions: str  # of the CPU, as torch uses them: AVX2, AVX512 ...
    bfloat16_products: str  # of the CPU, by oneDNN: yes or no
    oneDNN_limit: str  # of its instructions (ONEDNN_MAX_CPU_ISA), or none
    MKL_limit: str  # the same of MKL (MKL_ENABLE_INSTRUCTIONS)
    threads: int
    torch: str

    @classmethod
    def here(cls) -> "Instructions":
        return cls(
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            instructions=torch.backends.cpu.get_cpu_capability(),
            bfloat16_products="yes" if multiplies_bfloat16() else "no",
            oneDNN_limit=os.environ.get("ONEDNN_MAX_CPU_ISA") or "none",
            MKL_limit=os.environ.get("MKL_ENABLE_INSTRUCTIONS") or "none",
            threads=torch.get_num_threads(),
            torch=torch.__version__,
        )


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN has bfloat16 products for this processor; they may still be slow."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_precision(model: "PretrainedConfig | None", device: str) -> Choice:
    """Return the precision in which a ``cpu`` or ``cuda`` device multiplies clearly faster at a model's shapes, by
    default SmolLM2-135M's. Measures on a CPU, once per process. A GPU that this process doesn't see is assumed to
    support bfloat16."""
    shapes = Shapes() if model is None else Shapes.of(model)
    if shapes.hidden < _NARROW:
        return Choice("float32", f"layers {shapes.hidden} wide are too narrow for the choice to matter")
    if device == "cuda":
        if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice("bfloat16", "GPUs have units for it")
        return Choice("float32", "this GPU has no units for bfloat16", emulates=True)
    rates = measure(shapes, "cpu")
    return Choice(rates.chosen, _why(rates), rates.emulates, rates)


def _why(rates: Rates) -> str:
    gain = rates.gain
    if gain >= GAIN:
        comparison = f"{number(gain)} times as fast as float32"
    elif gain >= 1:
        comparison = f"bfloat16 is {number(gain)} times as fast, which is not worthwhile"
    else:
        comparison = f"bfloat16 takes {number(1 / gain)} times as long"
    return f"{comparison}; on one core {rates.in_words()}"


def autocast_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose weights autocast rounds to bfloat16 at every use, so that they can be stored or sent in
    it: the linear layers, including the head if ``model`` has one, and the experts. Norms are not rounded."""
    for module in model.modules():
        if type(module) is nn.Linear:
            yield module
    for _, experts in experts_of(model):
        yield experts
