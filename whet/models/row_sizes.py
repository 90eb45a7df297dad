"""Linear layers whose product of a row doesn't depend, to the bit, on the other rows.

Some kernels for CPUs add up in another order if there are more rows or fewer, for the last rows of a product, or if a
row begins at an address that is not a multiple of 16. A completion would then depend on what is sampled at the same
time, and a run on timing. So products are computed for fixed numbers of rows, which are filled up with zeros: for some
of ``SIZES``, whose products agree on this machine, for a layer's shape. Rows of unusual lengths are filled up, too.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from whet.models.packed_linear import PackedLinear

SIZES = (4, 8, 12, 16, 24, 32, 40, 48, 60, 64, 80, 96, 120, 128, 192, 240, 256)
_USUAL = 64  # rows of a step, at most
_READING = 12  # rows that take as long as reading the weight: more products with fewer rows each are slower, too
_READING_HALF = 32  # the same in bfloat16, which is used where products are fast
_ALIGNMENT = 64  # bytes
_NUMBERS = 256  # results that are compared: a few can agree by chance
Product = Callable[[Tensor], Tensor]


class FixedRows:
    """The product of a layer, computed for the given ``sizes`` (ascending) only."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self._product, self.sizes = product, sizes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product. [..., inputs] -> [..., outputs]"""
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        parts = _parts(count, self.sizes)
        if (filled := sum(parts)) > count:
            rows = nn.functional.pad(rows, (0, 0, 0, filled - count))
        products = [self._product(part) for part in (rows.split(parts) if parts else [rows])]
        product = products[0] if len(products) == 1 else torch.cat(products)
        return product[:count].view(*x.shape[:-1], product.shape[-1])


def _parts(count: int, sizes: Sequence[int]) -> list[int]:
    """Return the numbers of rows, each one of ``sizes``, in which ``count`` rows are computed."""
    whole, last = divmod(count, sizes[-1])
    return [sizes[-1]] * whole + ([next(size for size in sizes if size >= last)] if last else [])


def fix_rows(model: nn.Module) -> None:
    """Replace the forward pass of each plain linear layer of ``model`` on a CPU by ``FixedRows``."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu":
            setattr(layer, "forward", FixedRows(_product(layer), sizes_for(layer)))  # noqa: B010


def _product(layer: nn.Linear) -> Product:
    """Return the layer's forward pass, with rows that are filled up if they would begin at odd addresses."""
    missing = -layer.in_features % (_ALIGNMENT // layer.weight.element_size())
    if not missing:
        forward: Product = layer.forward
        return forward
    fill = partial(nn.functional.pad, pad=(0, missing))
    return lambda x: nn.functional.linear(fill(x), fill(layer.weight), layer.bias)


class _Kind(NamedTuple):
    """The properties of a layer that its kernel depends on."""

    inputs: int
    outputs: int
    bias: bool
    transposed: bool
    dtype: torch.dtype
    packed: bool


_chosen: dict[tuple[object, ...], Sequence[int]] = {}


def sizes_for(*layers: nn.Linear) -> Sequence[int]:
    """Return numbers of rows for which products agree on this machine, in layers like each of these."""
    kinds = [
        _Kind(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            not layer.weight.is_contiguous(),
            layer.weight.dtype,
            isinstance(layer.forward, PackedLinear),
        )
        for layer in layers
    ]
    key = (*kinds, torch.get_num_threads())
    if key not in _chosen:
        _chosen[key] = _agreeing(kinds)
    return _chosen[key]


@torch.no_grad()
def _agreeing(kinds: Sequence[_Kind]) -> Sequence[int]:
    """Compare products of equal rows: all rows of a product must be equal, and the products of all sizes. If no choice
    of sizes treats all rows alike, no other numbers of rows are better."""
    results: dict[int, bytes] = dict.fromkeys(SIZES, b"")
    for product, row in (trial for kind in kinds for trial in _trials(kind)):
        for size in list(results):
            made = product(row.repeat(size, 1))
            if torch.equal(made, made[:1].expand_as(made)):
                results[size] += (made[0].double() + 0.0).numpy().tobytes()  # no zeros below zero
            else:
                del results[size]
    agree: dict[bytes, list[int]] = {}
    for size, result in results.items():
        agree.setdefault(result, []).append(size)
    half = any(kind.dtype == torch.bfloat16 for kind in kinds)
    return min(agree.values(), key=partial(_cost, _READING_HALF if half else _READING), default=SIZES)


def _cost(reading: int, sizes: Sequence[int]) -> int:
    """Return about how long the usual numbers of rows take, in the time of a row."""
    parts = [_parts(count, sizes) for count in range(1, _USUAL + 1)]
    return sum(sum(rows) + reading * len(rows) for rows in parts)


def _trials(kind: _Kind) -> Iterator[tuple[Product, Tensor]]:
    """Yield a layer's product and a row for it. Its sums cancel: the results are rounding errors alone, which show any
    other order of addition if terms and their opposites are mixed. With a bias there are also sums that don't cancel,
    since their order shows whether it is added first or last."""
    random = torch.Generator().manual_seed(0)
    half = -(-kind.inputs // 2)
    mixed = torch.randperm(2 * half, generator=random)[: kind.inputs]
    rows, factors = (
        torch.randn(count, half, generator=random).to(kind.dtype)
        for count in (-(-_NUMBERS // kind.outputs), kind.outputs)
    )
    layer = nn.utils.skip_init(nn.Linear, kind.inputs, kind.outputs, kind.bias, dtype=kind.dtype)
    if kind.transposed:
        layer.weight = nn.Parameter(torch.empty(kind.inputs, kind.outputs, dtype=kind.dtype).T)
    layer.weight.copy_(torch.cat([factors, factors], 1)[:, mixed])
    if kind.packed:
        PackedLinear(layer)
    for sign in (-1, 1)[: 1 + kind.bias]:
        if kind.bias:
            layer.bias.copy_(torch.randn(kind.outputs, generator=random) * (sign > 0))
        for row in torch.cat([rows, sign * rows], 1)[:, mixed]:
            yield _product(layer), row
    if kind.packed:
        del layer.forward  # a cycle, which would keep both copies of the weight
