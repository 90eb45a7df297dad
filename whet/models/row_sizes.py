"""Linear layers whose product of a row doesn't depend, to the bit, on the other rows.

Some kernels for CPUs add up in another order if there are more rows or fewer, or if a row begins at an address that is
not a multiple of 16. A completion would then depend on what is sampled at the same time, and a run on timing. So
products are computed for fixed numbers of rows, which are filled up with zeros: for the ``SIZES`` whose products agree
on this machine, for a layer's shape, with the products of 64 rows. Rows of unusual lengths are filled up, too.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from whet.models.packed_linear import PackedLinear

SIZES = (4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256)
_REFERENCE = 64
_ALIGNMENT = 64  # bytes
_NUMBERS = 256  # results that are compared at each place of a block: a few can agree by chance
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
            packed = isinstance(layer.forward, PackedLinear)
            setattr(layer, "forward", FixedRows(_product(layer), sizes_for(layer, packed)))  # noqa: B010


def _product(layer: nn.Linear) -> Product:
    """Return the layer's forward pass, with rows that are filled up if they would begin at odd addresses."""
    missing = -layer.in_features % (_ALIGNMENT // layer.weight.element_size())
    if not missing:
        forward: Product = layer.forward
        return forward
    fill = partial(nn.functional.pad, pad=(0, missing))
    return lambda x: nn.functional.linear(fill(x), fill(layer.weight), layer.bias)


def sizes_for(layer: nn.Linear, packed: bool) -> Sequence[int]:
    """Return the numbers of rows for which products of the layer's shape agree on this machine."""
    shape = (layer.in_features, layer.out_features, layer.bias is not None)
    key = (*shape, layer.weight.dtype, packed, torch.get_num_threads())
    if key not in _chosen:
        _chosen[key] = _agreeing(*shape, layer.weight.dtype, packed)
    return _chosen[key]


@torch.no_grad()
def _agreeing(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, packed: bool) -> Sequence[int]:
    """Compare products of sums that cancel: their results are rounding errors alone, which show any other order of
    addition; with a bias, also other sums, in which it is added first or last. Each row is computed at another place of
    a block than in the reference, since its place can matter, too.
    """
    random = torch.Generator().manual_seed(0)
    half = -(-inputs // 2)
    terms, factors = (torch.randn(count, half, generator=random).to(dtype) for count in (2 * SIZES[-1], outputs))
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias, dtype=dtype)
    layer.weight.copy_(torch.cat([factors, factors], 1)[:, :inputs])
    if packed:
        PackedLinear(layer)
    product = _product(layer)
    order = torch.randperm(len(terms), generator=random)
    trials = max(2, -(-_NUMBERS // outputs))

    def agrees(size: int, x: Tensor, expected: Tensor) -> bool:
        parts = (order.roll(trial)[:size] for trial in range(trials))
        return all(torch.equal(product(x[part]), expected[part]) for part in parts)

    sizes: Sequence[int] = SIZES
    for sign in (-1, 1)[: 1 + bias]:
        if bias:
            layer.bias.copy_(torch.randn(outputs, generator=random) * (sign > 0))
        x = torch.cat([terms, sign * terms], 1)[:, :inputs].contiguous()
        expected = torch.cat([product(part) for part in x.split(_REFERENCE)])
        sizes = tuple(size for size in sizes if size == _REFERENCE or agrees(size, x, expected))
    if packed:
        del layer.forward  # a cycle, which would keep both copies of the weight
    return sizes
