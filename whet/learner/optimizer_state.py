"""The state of an optimizer, by parameter, and what it changes in its groups: to be saved, restored and moved."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.base.strict_json import JsonObject
from whet.learner.whole_matrices import WholeMatrices, cut_state
from whet.parallel.parameters import StateInShares

NUMBER = "-number"
"""Follows the kind of a state that is a Python number, in the names of saved tensors."""


def empty_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return a parameter's moments and number of steps before the first step."""
    p, made = parameter.detach(), optimizer  # type: Tensor, Any
    if isinstance(optimizer, WholeMatrices):
        whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        return cut_state(p, empty_state(optimizer.inner, whole))
    if isinstance(optimizer, torch.optim.AdamW):
        return {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return {"step": torch.zeros(()), "exp_avg": made._new_buffer(p, True), "exp_avg_sq": made._new_buffer(p, False)}


def stored_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, name: str, stored: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return a parameter's state, to be filled from files that describe it in ``stored``, by KIND/NAME."""
    if isinstance(optimizer, StateInShares):
        return optimizer.empty_state_of(parameter)
    if _is_adamw(optimizer):
        return empty_state(optimizer, parameter)
    kinds = {key.partition("/")[0]: tensor for key, tensor in stored.items() if key.partition("/")[2] == name}
    return {kind: _empty(parameter.detach(), tensor) for kind, tensor in kinds.items()}


def _empty(parameter: Tensor, stored: Tensor) -> Tensor:
    """Return a tensor for a stored one: sharded like the parameter if it has its shape. A single number, such as a
    count of steps, is on the CPU, where optimizers read it."""
    if stored.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.dtype)
    return torch.empty_like(stored, device=parameter.device if stored.dim() else "cpu")


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Mapping[str, object]:
    """Return a parameter's state; empty before the first step."""
    if isinstance(optimizer, StateInShares):
        return optimizer.state_of(parameter)
    return optimizer.state.get(parameter, {})


def replace_states(optimizer: torch.optim.Optimizer, states: Iterable[tuple[Tensor, dict[str, object]]]) -> None:
    """Replace the state of all parameters."""
    optimizer.state.clear()
    for parameter, state in states:
        if isinstance(optimizer, StateInShares):
            optimizer.set_state(parameter, state)
        else:
            optimizer.state[parameter] = state


def restored(state: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the state as the optimizer had it, from the tensors that ``pieces`` made of it."""
    return {
        kind.removesuffix(NUMBER): tensor.item() if kind.endswith(NUMBER) else tensor for kind, tensor in state.items()
    }


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Return the settings of each parameter group, but the learning rate, as plain data; tensors of one number as that
    number."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key not in ("params", "lr")
        }
        for group in optimizer.param_groups
    ]


def changed_settings(optimizer: torch.optim.Optimizer, made: Sequence[Mapping[str, object]]) -> list[JsonObject]:
    """Return the settings of each group that are not as they were ``made``: some optimizers keep counts and estimates
    there. Raises ``WhetError`` for one that is not plain data."""
    changed = [
        {key: value for key, value in now.items() if key not in before or _differ(value, before[key])}
        for now, before in zip(group_settings(optimizer), made, strict=True)
    ]
    try:
        json.dumps(changed)
    except (TypeError, ValueError) as error:
        raise WhetError(f"the optimizer keeps in its parameter groups what can't be saved ({error})") from None
    return changed


def _differ(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return not torch.equal(first, second)
    return isinstance(first, Tensor) or isinstance(second, Tensor) or bool(first != second)


def check_settings(optimizer: torch.optim.Optimizer, changed: Sequence[JsonObject]) -> None:
    """Raise ``WhetError`` if changed settings belong to other groups."""
    if any(changed) and len(changed) != len(optimizer.param_groups):
        raise WhetError(
            f"the optimizer was saved with {len(changed)} parameter groups and has {len(optimizer.param_groups)}: "
            "resume with the optimizer.groups that it was saved with"
        )


def restore_settings(optimizer: torch.optim.Optimizer, changed: Sequence[JsonObject]) -> None:
    """Set what ``changed_settings`` returned."""
    for group, values in zip(optimizer.param_groups, changed, strict=False):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, WholeMatrices):
        return _is_adamw(optimizer.inner)
    return isinstance(optimizer, torch.optim.AdamW) or hasattr(optimizer, "_new_buffer")  # in 8 bits


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments of each parameter that has none. Before the first gradients rather than after them, as the
    optimizer would: so that in the heap they lie together, and not scattered over what activations leave."""
    if not _is_adamw(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = empty_state(optimizer, parameter)


def pieces(state: Mapping[str, object], name: str) -> dict[str, Tensor]:
    """Return the plain tensors of a parameter's state, as KIND/NAME: an 8-bit moment has two. Numbers become tensors.
    Raises ``WhetError`` for a state that is neither."""
    tensors: dict[str, Tensor] = {}
    for kind, tensor in state.items():
        if tensor is None:
            continue
        if isinstance(tensor, int | float):
            tensors[f"{kind}{NUMBER}/{name}"] = torch.tensor(
                tensor, dtype=torch.float64 if isinstance(tensor, float) else torch.int64
            )
            continue
        if not isinstance(tensor, Tensor):
            raise WhetError(f"the optimizer's state {kind!r} is a {type(tensor).__name__}; only tensors can be saved")
        parts = [part for part in ("codes", "scale") if hasattr(tensor, part)]
        tensors |= {f"{kind}/{part}/{name}": getattr(tensor, part) for part in parts} or {f"{kind}/{name}": tensor}
    return tensors


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    """Move the moments to ``device``; None: to the device of their parameters. Copies from a GPU are asynchronous."""
    for parameter, kinds in optimizer.state.items():
        for kind in kinds.keys() - {"step"}:  # AdamW needs the step count where it is
            if not isinstance(kinds[kind], Tensor) or not kinds[kind].dim():
                continue
            kinds[kind] = _moved(kinds[kind], device or parameter.device)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Start a copy, between a GPU and pinned memory, which torch caches for the next call."""
    if device.type == "cpu" and tensor.device.type == "cuda" and type(tensor) is Tensor:
        host = torch.empty_like(tensor, device=device, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)
