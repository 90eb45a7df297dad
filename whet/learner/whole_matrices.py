"""Optimizers that look at whole matrices, such as Adafactor, on matrices that are sharded over ranks.

One matrix after the other is gathered with its gradient and its state, updated by the optimizer on every rank, and cut
again. So the step is that of one process, whatever the sharding. Between steps a state of the matrix's shape is sharded
like it; any other state, such as a sum for each row, is whole on each rank.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from whet.parallel.parameters import copy_part, full_tensor, local, part_of


class WholeMatrices(torch.optim.Optimizer):
    """``inner`` on whole matrices; it must compute each from its own gradients alone. All ranks step together."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        for parameter, state in inner.state.items():  # some classes make states when they are built
            self.state[parameter] = cut_state(parameter, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            before = {name: value for name, value in group.items() if name != "params"}
            after = before
            for parameter in [p for p in group["params"] if p.grad is not None]:
                after = copy.deepcopy(before)  # numbers of the group change once in a step, not once for each matrix
                self._update(parameter, after)
            group |= after

    def _update(self, parameter: Tensor, settings: dict[str, Any]) -> None:
        """Update one matrix, and the settings of its group."""
        device = parameter.device
        if isinstance(parameter, DTensor):
            device = torch.device(parameter.device_mesh.device_type)  # offloaded parameters are on the CPU
        assert parameter.grad is not None
        matrix = nn.Parameter(full_tensor(parameter.detach(), device))
        matrix.grad = full_tensor(parameter.grad, device)
        self.inner.state = defaultdict(dict)
        if parameter in self.state:
            self.inner.state[matrix] = {kind: _whole(v, device) for kind, v in self.state[parameter].items()}
        group = {**settings, "params": [matrix]}
        self.inner.param_groups = [group]
        self.inner.step()
        settings |= {name: value for name, value in group.items() if name != "params"}
        self.state[parameter] = cut_state(parameter, self.inner.state[matrix])
        local(parameter).copy_(part_of(parameter, matrix.detach()))


def cut_state(parameter: Tensor, state: Mapping[str, object]) -> dict[str, object]:
    """Return the state of a whole matrix as it is kept between steps for ``parameter``, which may be sharded."""
    return {kind: _cut(parameter, value) for kind, value in state.items()}


def _cut(parameter: Tensor, value: object) -> object:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.dim():
        return value
    if hasattr(value, "__tensor_flatten__"):  # a tensor made of others, such as codes and scales
        return _rebuilt(value, {name: _cut(parameter, part) for name, part in _parts(value).items()})
    if value.shape != parameter.shape or not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    kept = torch.empty_like(parameter.detach(), dtype=value.dtype)
    copy_part(kept, value)
    return kept


def _whole(value: object, device: torch.device) -> object:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if isinstance(value, DTensor):
        return full_tensor(value, device)
    if hasattr(value, "__tensor_flatten__"):
        return _rebuilt(value, {name: _whole(part, device) for name, part in _parts(value).items()})
    return value.to(device)


def _parts(value: Any) -> dict[str, Tensor]:
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def _rebuilt(value: Any, parts: dict[str, Any]) -> object:
    return type(value).__tensor_unflatten__(parts, value.__tensor_flatten__()[1], value.shape, value.stride())
