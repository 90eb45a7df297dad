"""Linear layers in 4 bits that tensor parallelism splits. Each rank has the packed weights and the scales of its part;
no block of weights is split, so the weights have the bits that they have in one process."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from whet.base.errors import WhetError
from whet.models.quantized import BLOCK, QuantizedLinear, product, restore
from whet.parallel.parameters import local


class SplitQuantizedLinear(QuantizedLinear):
    """A layer whose rows or columns are split over ranks. Its ``packed`` and ``scales`` are DTensors."""

    dim: int  # 0: each rank computes some of the outputs; 1: a partial sum of each output, from some of the inputs
    stream: Placement  # the layout of the summed outputs

    def restored(self) -> Tensor:
        packed: DTensor = self.packed  # type: ignore[assignment]
        return DTensor.from_local(self._part(), packed.device_mesh, packed.placements, run_check=False)

    def _part(self) -> Tensor:
        packed = local(self.packed)
        return restore(packed, local(self.scales), [len(packed), 2 * packed.shape[1]], self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs for the whole ``x``, or all outputs for its part of ``x``, in the layout
        ``stream``."""
        bias = None if self.bias is None else local(self.bias)
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()])
        if self.dim == 0:
            return product(x, self._part, bias)
        mesh = self.packed.device_mesh  # type: ignore[attr-defined]
        partial = DTensor.from_local(product(x, self._part, None), mesh, [Partial()], run_check=False)
        summed = partial.redistribute(placements=[self.stream]).to_local()
        return summed if bias is None else summed + bias.to(summed.dtype)


class SplitQuantized(ParallelStyle):
    """Splits the rows (``dim`` 0) or columns (1) of a quantized layer."""

    def __init__(self, name: str, dim: int, stream: Placement) -> None:
        self.name, self.dim, self.stream = name, dim, stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Raises ``WhetError`` if the ranks' parts have no whole blocks of weights."""
        layer: QuantizedLinear = module  # type: ignore[assignment]
        if layer.scales.dim() == 1 or layer.scales.shape[self.dim] % device_mesh.size():
            raise WhetError(
                f"model.lora.quantize: parallel.tensor = {device_mesh.size()} can't split {self.name}, with "
                f"{layer.in_features} inputs and {layer.out_features} outputs, into equal parts of whole blocks of "
                f"{BLOCK} weights along its inputs; choose another size, or use parallel.fsdp"
            )
        for name in ("packed", "scales"):
            setattr(layer, name, distribute_tensor(getattr(layer, name), device_mesh, [Shard(self.dim)]))
        if layer.bias is not None:
            cut = Replicate() if self.dim else Shard(0)
            layer.bias = nn.Parameter(distribute_tensor(layer.bias, device_mesh, [cut]), requires_grad=False)
        layer.__class__ = SplitQuantizedLinear
        layer.dim, layer.stream = self.dim, self.stream  # type: ignore[assignment]
        return layer
