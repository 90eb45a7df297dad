"""A device that is not the CPU, for machines without one. ``python -m tests.elsewhere RECIPE FOLDER`` trains on it.

Its tensors hold tensors of the CPU, which compute. As on a GPU, an operation refuses tensors of two devices, and NumPy
can't read them. It has no streams, no other kernels and no other memory.
"""

import sys
from pathlib import Path
from typing import Any

import whet  # noqa: F401 before torch, as in every program

# isort: split
import pytest
import torch
import torch.utils._device
from torch import library as operators
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from whet.config import load
from whet.learner import worker
from whet.models import device as devices
from whet.run import run
from whet.run.recipe import Recipe

aten = torch.ops.aten
_COPIES = {aten.copy_, aten._to_copy}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # a GPU copies indices of the CPU


class _Module(backend_registration._DummyBackendModule):  # type: ignore[misc]  # torch gives it no types
    """The functions that torch expects in ``torch.elsewhere``."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


backend_registration._setup_privateuseone_for_python_backend("elsewhere", _Module())
DEVICE = torch.device("elsewhere", 0)


class Elsewhere(torch.Tensor):
    """A tensor of the device; ``held`` is the tensor of the CPU with its numbers."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Elsewhere":
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, *args, **(kwargs or {}))

    # Python's side of torch can't do these with a class of tensors; a GPU's tensors have them.

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    def new_tensor(self, data: Any, **named: Any) -> torch.Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": DEVICE, **named})

    def __getitem__(self, places: Any) -> Any:
        return super().__getitem__(_with_tensors(places))

    def __setitem__(self, places: Any, values: Any) -> None:
        super().__setitem__(_with_tensors(places), values)


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an operation of which a tensor or the result is on the device. Raises ``RuntimeError`` if it mixes the
    device with the CPU."""
    packet = func.overloadpacket
    place = kwargs.get("device")
    first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
    here = isinstance(first, Elsewhere) if place is None else torch.device(place).type == DEVICE.type
    read = (args[0], args[2:]) if packet in _INDEXED and isinstance(first, Elsewhere) else (args, kwargs)
    with_axes = [leaf for leaf in tree_leaves(read) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if packet not in _COPIES and len({type(leaf) is Elsewhere or leaf.device for leaf in with_axes}) > 1:
        raise RuntimeError(f"{func} mixes devices: {[(str(leaf.device), tuple(leaf.shape)) for leaf in with_axes]}")
    onto_cpu = {} if place is None else {"device": "cpu", "pin_memory": False}
    on_cpu = {**kwargs, **{name: value for name, value in onto_cpu.items() if name in kwargs}}
    held = [tree_map_only(Elsewhere, lambda tensor: tensor.held, each) for each in (args, on_cpu)]
    result = func(*held[0], **held[1])
    if not here:
        return result
    result = tree_map_only(torch.Tensor, Elsewhere, result)
    aliases = func._schema.is_mutable or func.is_view
    return return_and_correct_aliasing(func, args, kwargs, result) if aliases else result


def _with_tensors(places: Any) -> Any:
    """Return indices with tensors of the CPU for lists and ranges of integers."""
    if isinstance(places, tuple):
        return tuple(map(_with_tensors, places))
    return torch.tensor(list(places)) if isinstance(places, list | range) else places


torch.utils._device._device_constructors()  # torch remembers its constructors before one is replaced
_made_on_cpu = torch.tensor


def _tensor(data: Any, device: Any = None, **named: Any) -> torch.Tensor:
    """``torch.tensor``, which can't make tensors of such a device."""
    if device is None or torch.device(device).type != DEVICE.type:
        return _made_on_cpu(data, device=device, **named)
    return _made_on_cpu(data, **named).to(device)


def choose_device(name: str = "auto", rank: int = 0) -> torch.device:
    """Return the device, as a machine with one GPU returns its GPU."""
    return DEVICE


def use() -> None:
    """Have learners and generators of this process compute on the device."""
    global _fallbacks  # torch forgets them with this object
    _fallbacks = operators.Library("_", "IMPL")
    _fallbacks.fallback(compute, "PrivateUse1")
    _fallbacks.fallback(operators.fallthrough_kernel, "AutocastPrivateUse1")
    torch.tensor = _tensor
    for module in (devices, worker, run):
        module.choose_device = choose_device  # type: ignore[attr-defined]


def main() -> None:
    """Train the recipe that the first word names, into the folder that the second one names."""
    use()
    with pytest.raises(RuntimeError, match="mixes devices"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
    run.start(load(Recipe, Path(sys.argv[1])).value, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
