"""DoRA (arXiv 2402.09353) of a matrix W that tensor parallelism splits: its output is m (W + s B A) x / |W + s B A|,
with a trained norm m and a norm |.| for each row of the matrix. The latter counts as a constant, as in the paper.

Where the rows are split, each rank has whole rows and their m. Where the columns are split, the squares of each row are
summed over ranks, and m is on each of them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from whet.parallel.parameters import local


class SplitDora(ParallelStyle):
    """Splits PEFT's layer with the norms m, and replaces its forward pass, which needs the whole matrix."""

    def __init__(self, rows: bool, stream: Placement) -> None:
        """``rows``: the rows of the matrix are split, otherwise its columns. ``stream``: the layout of its output then,
        either whole or split by tokens."""
        self.rows, self.cut = rows, Shard(0) if rows else Replicate()
        self.gradient = self.cut if rows or stream.is_replicate() else Partial()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, device_mesh, [self.cut]))

        def forward(
            x: Tensor,
            *,
            lora_A: Any,
            lora_B: Any,
            scaling: float,
            base_layer: Any,
            base_result: Tensor | None = None,
            **_: object,
        ) -> Tensor:
            """Return what is added to the output of W, like PEFT's layer."""
            result = base_layer(x) if base_result is None else base_result
            if base_layer.bias is not None:
                result = result - local(base_layer.bias)
            norms = self._norms(base_layer.weight, lora_A.weight, lora_B.weight, scaling, x.dtype, device_mesh)
            scale = layer.weight.to_local(grad_placements=[self.gradient]) / norms
            return (scale - 1) * result + scale * lora_B(lora_A(x)) * scaling

        vars(module)["forward"] = forward
        return module

    @torch.no_grad()
    def _norms(
        self, weight: Tensor, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype, mesh: DeviceMesh
    ) -> Tensor:
        """Return the norm of each row on this rank, as PEFT computes it."""
        rows = local(weight).to(dtype) + scaling * (local(b) @ local(a)).to(dtype)
        if self.rows:
            return torch.linalg.norm(rows, dim=1)
        squares = torch.linalg.norm(rows, dim=1).square()
        dist.all_reduce(squares, group=mesh.get_group())
        return squares.sqrt()
