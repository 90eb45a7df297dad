"""The precision that a model is computed in on a device: the choice behind ``auto``, and the facts of a processor that
decide whether two machines compute the same bits.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from whet.models.rates import GAIN, Multiplies, Rates, Shapes, measure, number

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NARROW = 256  # hidden size below which products take too little of the time to decide


@dataclass(frozen=True, slots=True)
class Choice:
    """The faster precision."""

    precision: Multiplies
    why: str
    emulates: bool = False  # bfloat16 would be slower
    rates: Rates | None = None  # None: not measured

    def __str__(self) -> str:
        return f"{self.precision} ({self.why})"


@dataclass(frozen=True, slots=True)
class Instructions:
    """The facts of a machine that the last digits of a result depend on."""

    device: str  # a GPU's name, or "cpu"
    instructions: str  # of the CPU, as torch uses them: AVX2, AVX512 ...
    bfloat16_products: str  # of the CPU, by oneDNN: yes or no
    oneDNN_limit: str  # of its instructions (ONEDNN_MAX_CPU_ISA), or none
    threads: int
    torch: str

    @classmethod
    def here(cls) -> "Instructions":
        return cls(
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            instructions=torch.backends.cpu.get_cpu_capability(),
            bfloat16_products="yes" if multiplies_bfloat16() else "no",
            oneDNN_limit=os.environ.get("ONEDNN_MAX_CPU_ISA") or "none",
            threads=torch.get_num_threads(),
            torch=torch.__version__,
        )


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN has bfloat16 products for this processor; they may still be slow."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_precision(model: "PretrainedConfig | None", device: str) -> Choice:
    """Return the precision in which a ``cpu`` or ``cuda`` multiplies clearly faster at a model's shapes, by default
    those of SmolLM2-135M. Measures on a CPU, once in a process. A GPU that this process doesn't see is taken to have
    bfloat16."""
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
        found = f"{number(gain)} times as fast as float32"
    elif gain >= 1:
        found = f"bfloat16 is {number(gain)} times as fast, which does not pay"
    else:
        found = f"bfloat16 takes {number(1 / gain)} times as long"
    return f"{found}; on one core {rates.in_words()}"
