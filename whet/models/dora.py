"""DoRA (arXiv 2402.09353): with LoRA, the output of a matrix W is m (W + s B A) x / |W + s B A|, with a trained norm m
and a norm |.| for each row of the matrix. The latter counts as a constant, as in the paper.

PEFT creates, saves and merges the norms. Its forward pass computes |.| in the dtype of A, which is bfloat16 where FSDP
gathers A so; here it has the dtype of m everywhere. W may be in 4 bits.
"""

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from whet.models.quantized import QuantizedLinear


class DoraLayer(DoraLinearLayer):
    """The norms m of one matrix."""

    weight: nn.Parameter

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return what is added to the output of W for an input ``x``; ``base_result`` is this output, if it has been
        computed. [..., inputs] -> [..., outputs]"""
        result = base_layer(x) if base_result is None else base_result
        if base_layer.bias is not None:
            result = result - self.part(base_layer.bias)
        scale = self.magnitudes() / self.norms(base_layer, lora_A.weight, lora_B.weight, scaling)
        return (scale - 1) * result + scale * lora_B(lora_A(x)) * scaling

    @torch.no_grad()
    def norms(self, base_layer: Any, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """Return the norm of each row of W + s B A, from matrices that are rounded as for their products. [outputs]"""
        weight = base_layer.restored() if isinstance(base_layer, QuantizedLinear) else base_layer.weight
        weight, a, b = (self._as_multiplied(self.part(matrix)) for matrix in (weight, a, b))
        with torch.autocast(weight.device.type, enabled=False):
            return self.row_norms((weight.T if self.fan_in_fan_out else weight) + scaling * (b @ a))

    def _as_multiplied(self, matrix: Tensor) -> Tensor:
        kind = matrix.device.type
        if torch.is_autocast_enabled(kind):
            matrix = matrix.to(torch.get_autocast_dtype(kind))
        return matrix.to(self.weight.dtype)

    def part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor."""
        return tensor

    def magnitudes(self) -> Tensor:
        """Return m of this rank's outputs."""
        return self.weight

    def row_norms(self, rows: Tensor) -> Tensor:
        """Return the norms of the rows of which this rank has ``rows``, or a part of each."""
        return torch.linalg.norm(rows, dim=1)


def take_over(model: nn.Module) -> None:
    """Replace the forward passes of PEFT's layers."""
    for module in model.modules():
        if type(module) is DoraLinearLayer:
            module.__class__ = DoraLayer
