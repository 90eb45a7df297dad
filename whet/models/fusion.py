"""Faster products for inference, behind the linear layers of a model that stays as it is.

Two things are done. Siblings (q, k, v; gate, up) share an input, so they become one wide product: each layer's
``weight`` turns into a view of joint storage. And on a CPU the wide weight is kept a second time in the order in which
oneDNN's kernel reads it, which saves reordering it in every call (a quarter of the time at 64 rows, more at fewer).
The layers' own weights stay the truth: copy new values into them and the next product uses them. Knows linear layers
only by the names they have in transformers; what it does not recognise is left alone.
"""

from functools import partial

import torch
from torch import Tensor, nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product:
    """One product for one or more linear layers with the same input.

    The first sibling that is called computes all, and the others get their part when called with the same input.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.linears = linears
        self.sizes = [linear.out_features for linear in linears]
        self.weight, self.bias = linears[0].weight.data, None if linears[0].bias is None else linears[0].bias.data
        if len(linears) > 1:
            self._join_storage()
        self.addresses = self._addresses()
        self.packable = _packable(self.weight)
        self.packed: Tensor | None = None
        self.packed_at: tuple[int, ...] = ()
        self.source: Tensor | None = None  # the input whose remaining parts are waiting
        self.stamp: tuple[int, ...] = ()
        self.waiting: dict[int, Tensor] = {}
        for index, linear in enumerate(linears):
            setattr(linear, "forward", partial(self, index))  # noqa: B010

    def _join_storage(self) -> None:
        self.weight = torch.cat([linear.weight.data for linear in self.linears])
        for linear, weight in zip(self.linears, self.weight.split(self.sizes), strict=True):
            linear.weight.data = weight
        if self.bias is not None:
            self.bias = torch.cat([linear.bias.data for linear in self.linears])
            for linear, bias in zip(self.linears, self.bias.split(self.sizes), strict=True):
                linear.bias.data = bias

    def _addresses(self) -> list[int]:
        return [p.data_ptr() for linear in self.linears for p in (linear.weight, linear.bias) if p is not None]

    def _written(self) -> tuple[int, ...]:
        """Return a stamp that changes when a weight or bias is written to."""
        return tuple(p._version for linear in self.linears for p in (linear.weight, linear.bias) if p is not None)

    def refresh(self) -> None:
        """Forget what was derived from the weights."""
        self.packed, self.source, self.waiting = None, None, {}

    def __call__(self, index: int, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return nn.functional.linear(x, self.linears[index].weight, self.linears[index].bias)
        written = self._written()
        stamp = (x._version, *written)
        if x is self.source and stamp == self.stamp and index in self.waiting:
            part = self.waiting.pop(index)
            if not self.waiting:
                self.source = None
            return part
        if self._addresses() != self.addresses:  # a layer got new storage (a cast, another device)
            self.refresh()
            return nn.functional.linear(x, self.linears[index].weight, self.linears[index].bias)
        whole = self._whole(x, written)
        if len(self.linears) == 1:
            return whole
        parts = whole.split(self.sizes, dim=-1)
        self.source, self.stamp = x, stamp
        self.waiting = {other: part for other, part in enumerate(parts) if other != index}
        return parts[index]

    def _whole(self, x: Tensor, written: tuple[int, ...]) -> Tensor:
        if not self.packable:
            return nn.functional.linear(x, self.weight, self.bias)
        if self.packed is None or written != self.packed_at:
            self.packed, self.packed_at = torch.ops.mkldnn._reorder_linear_weight(self.weight, 64), written
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def _packable(weight: Tensor) -> bool:
    """Return whether oneDNN has a kernel for packed weights like this one here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def fuse(model: nn.Module) -> list[Product]:
    """Put joint and packed products behind the linear layers of ``model``, in place; returns them.

    Meant for inference in one thread: with gradients enabled each layer computes its own product from its own weight.
    Call ``refresh`` on each after writing to weights in a way that autograd's version counters do not see (``.data``).
    """
    products = []
    for parent in list(model.modules()):
        for names in SIBLINGS:
            siblings = [x for name in names for x in _untouched(getattr(parent, name, None))]
            if len(siblings) == len(names) and _alike(siblings):
                products.append(Product(siblings))
    singles = [x for module in model.modules() for x in _untouched(module)]
    return products + [Product([linear]) for linear in singles if _packable(linear.weight)]


def _untouched(module: object) -> list[nn.Linear]:
    """The module, if it is a plain linear layer with nothing put behind it yet."""
    return [module] if type(module) is nn.Linear and "forward" not in vars(module) else []


def _alike(linears: list[nn.Linear]) -> bool:
    kinds = {(x.in_features, x.bias is None, x.weight.dtype, x.weight.device) for x in linears}
    return len(kinds) == 1
