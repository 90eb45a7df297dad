"""Linear layers whose product of a row doesn't depend, to the bit, on the other rows.

Some kernels for CPUs add up in another order if there are more rows or fewer. A completion would then depend on what is
sampled at the same time, and a run on timing. So products are computed for fixed numbers of rows, which are filled up
with zeros: for all of ``SIZES`` if they agree on this machine for a layer's shape, else for ``ONE_SIZE`` alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from whet.models.packed_linear import PackedLinear

SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
ONE_SIZE = (64,)
Product = Callable[[Tensor], Tensor]
_chosen: dict[tuple[object, ...], Sequence[int]] = {}


class FixedRows:
    """The product of a layer, computed for the given ``sizes`` (ascending) only."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self._product, self.sizes = product, sizes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product. [..., inputs] -> [..., outputs]"""
        rows = x.reshape(-1, x.shape[-1])
        count, most = len(rows), self.sizes[-1]
        last = count % most
        size = next(size for size in self.sizes if size >= last) if last else 0
        if size > last:
            rows = nn.functional.pad(rows, (0, 0, 0, size - last))
        parts = rows.split([most] * (count // most) + [size] * (size > 0)) if count else [rows]
        products = [self._product(part) for part in parts]
        product = products[0] if len(products) == 1 else torch.cat(products)
        return product[:count].view(*x.shape[:-1], product.shape[-1])


def fix_rows(model: nn.Module) -> None:
    """Replace the forward pass of each plain linear layer of ``model`` on a CPU by ``FixedRows``."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu":
            product: Product = layer.forward
            setattr(layer, "forward", FixedRows(product, sizes_for(layer, isinstance(product, PackedLinear))))  # noqa: B010


def sizes_for(layer: nn.Linear, packed: bool) -> Sequence[int]:
    """Return the numbers of rows for which products of the layer's shape agree on this machine."""
    shape = (layer.in_features, layer.out_features, layer.bias is not None)
    key = (*shape, layer.weight.dtype, packed, torch.get_num_threads())
    if key not in _chosen:
        _chosen[key] = SIZES if _agree(*shape, layer.weight.dtype, packed) else ONE_SIZE
    return _chosen[key]


@torch.no_grad()
def _agree(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, packed: bool) -> bool:
    """Return whether products agree on sums that cancel: their results are rounding errors alone, which show any other
    order of addition."""
    random = torch.Generator().manual_seed(0)
    half = -(-inputs // 2)
    terms, factors = (torch.randn(count, half, generator=random).to(dtype) for count in (SIZES[-1], outputs))
    x = torch.cat([terms, -terms], 1)[:, :inputs]
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias, dtype=dtype)
    layer.weight.copy_(torch.cat([factors, factors], 1)[:, :inputs])
    if bias:
        layer.bias.zero_()
    product: Product = PackedLinear(layer) if packed else layer.forward
    whole = product(x)
    return all(torch.equal(product(x[:size]), whole[:size]) for size in SIZES)
