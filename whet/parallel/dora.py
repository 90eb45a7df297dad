"""DoRA of a matrix W that tensor parallelism splits.

Where the rows are split, each rank has whole rows and their norms m. Where the columns are split, the squares of each
row are summed over ranks, and m is on each of them.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from whet.models.dora import DoraLayer
from whet.parallel.parameters import local


class SplitDoraLayer(DoraLayer):
    """The norms m of a matrix whose rows or columns are split. They are a DTensor."""

    rows: bool  # the rows are split
    gradient: Placement  # of m

    def part(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def magnitudes(self) -> Tensor:
        norms: DTensor = self.weight  # type: ignore[assignment]
        return norms.to_local(grad_placements=[self.gradient])

    def row_norms(self, rows: Tensor) -> Tensor:
        norms = super().row_norms(rows)
        if self.rows:
            return norms
        squares = norms.square()
        dist.all_reduce(squares, group=self.weight.device_mesh.get_group())  # type: ignore[attr-defined]
        return squares.sqrt()


class SplitDora(ParallelStyle):
    """Splits the norms m of a matrix."""

    def __init__(self, rows: bool, stream: Placement) -> None:
        """``rows``: the rows of the matrix are split, otherwise its columns. ``stream``: the layout of its output then,
        either whole or split by tokens."""
        self.rows, self.cut = rows, Shard(0) if rows else Replicate()
        self.gradient = self.cut if rows or stream.is_replicate() else Partial()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: DoraLayer = module  # type: ignore[assignment]
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, device_mesh, [self.cut]))
        layer.__class__ = SplitDoraLayer
        layer.rows, layer.gradient = self.rows, self.gradient
        return layer
