"""The optimizer, its learning rate schedule, and the gradient norm."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from whet.base.errors import ConfigError, WhetError
from whet.base.extras import extra
from whet.base.strict_json import JsonObject
from whet.config.component import ComponentError, import_path
from whet.learner.config import OptimizerConfig, ParameterGroup
from whet.learner.muon import build_muon
from whet.learner.whole_matrices import WholeMatrices, cut_state
from whet.parallel.parameters import StateInShares, local
from whet.parallel.pipeline import Pipeline

NUMBER = "-number"
"""Follows the kind of a state that is a Python number, in the names of saved tensors."""
_NOT_HIDDEN = r"embed|lm_head|value_head|wte|wpe|bias$"


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0) out of ``steps``. A run that continues beyond ``steps`` stays
    at the minimum.

    Warm-up: lr (step + 1) / warmup_steps. Then the schedule falls from lr at the first step after the warm-up towards
    min_lr_ratio lr, which it would reach at step ``steps`` (linear, or half a cosine: arXiv 1608.03983).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.schedule]
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, pipeline: Pipeline | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that require a gradient; freeze the parameters that ``config.groups``
    says. Raises ``ConfigError`` if a group matches nothing, a package is missing, or a class takes other arguments. On
    the ranks of a pipeline, which all must call this together, it has the same groups, some of them empty."""
    groups = _groups(named, config, pipeline)
    if config.type == "muon":
        with _arguments(config):
            return build_muon(groups, {"lr": config.lr, **config.settings}, partial(_adamw, config=config))
    if config.type != "adamw":
        return _of_class(groups, config)
    if config.moments == "float32":
        return _adamw(groups, config)
    with extra("torchao", "optimizer.moments=8bit"):
        from torchao.optim import AdamW8bit
    return _gathering(AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps))


def _groups(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, pipeline: Pipeline | None
) -> list[dict[str, object]]:
    """Return torch's parameter groups. By default weight decay is for matrices only. ``ratio``: of a group's learning
    rate to the optimizer's; ``hidden``: matrices other than embeddings and heads."""
    trained = {name: p for name, p in named if p.requires_grad}
    kinds = {name: (p.dim(), _mesh_of(p)) for name, p in trained.items()}
    if pipeline is not None:
        kinds = {name: kind for stage in pipeline.all_gather(kinds) for name, kind in stage.items()}
    for rule in config.groups:
        if not any(re.search(rule.match, name) for name in kinds):
            raise ConfigError(
                f"optimizer.groups: {rule.match!r} matches none of the {len(kinds)} trained parameters, such as "
                f"{', '.join(list(kinds)[:3])}"
            )
    groups: dict[Any, dict[str, Any]] = {}
    for name in sorted(kinds, key=lambda name: (kinds[name][0] < 2, name)):  # the same order in any layout
        dim, mesh = kinds[name]
        rule = next((rule for rule in config.groups if re.search(rule.match, name)), ParameterGroup(match=""))
        if rule.freeze:
            if name in trained:
                trained[name].requires_grad_(False)
            continue
        decay = config.weight_decay if dim >= 2 else 0.0
        settings: dict[str, Any] = {"weight_decay": decay if rule.weight_decay is None else rule.weight_decay}
        if rule.lr is not None:
            settings["ratio"] = rule.lr / config.lr if config.lr else 1.0
        if config.type == "muon":
            of_experts = dim == 3 and ".experts." in name  # a matrix for each
            settings["hidden"] = (dim == 2 or of_experts) and not re.search(_NOT_HIDDEN, name)
        # parameters of one fused update must be sharded over the same ranks
        group = groups.setdefault((dim >= 2, mesh, *settings.items()), {"params": [], **settings})
        if name in trained:
            group["params"].append(trained[name])
    if kinds and not groups:
        raise ConfigError("optimizer.groups freezes every parameter; leave some to be trained")
    # a stage of a pipeline may have no layer with an adapter
    return list(groups.values()) or [{"params": [], "weight_decay": config.weight_decay}]


def _mesh_of(parameter: Tensor) -> object:
    """Return the dimensions over which a parameter is sharded; the same in each stage of a pipeline."""
    mesh = getattr(parameter, "device_mesh", None)
    return None if mesh is None else (mesh.mesh_dim_names, tuple(mesh.shape))


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _of_class(groups: list[dict[str, object]], config: OptimizerConfig) -> torch.optim.Optimizer:
    try:
        made: Any = torch.optim.Adafactor if config.type == "adafactor" else import_path(config.type)
    except ComponentError as error:
        raise ConfigError(f"optimizer.type: {error}") from error
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.type = {config.type} is not derived from torch.optim.Optimizer")
    build: Callable[..., torch.optim.Optimizer] = made
    with _arguments(config):
        optimizer = build(groups, lr=config.lr, **config.settings)
    return optimizer if config.works_on == "numbers" else _gathering(optimizer)


def _gathering(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer, which looks at whole matrices, so that it works on sharded ones."""
    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    return WholeMatrices(optimizer) if sharded else optimizer


@contextmanager
def _arguments(config: OptimizerConfig) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.settings = {config.settings} of {config.type}: {error}") from error


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        scaled = rate * group.get("ratio", 1.0)
        if isinstance(group["lr"], Tensor):  # a compiled step reads the tensor
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


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


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the Euclidean norm over all gradients, []."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)


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


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place."""
    if gradients := [local(p.grad) for p in parameters if p.grad is not None]:  # a stage may have none
        torch._foreach_mul_(gradients, factor)
