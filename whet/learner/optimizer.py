"""The optimizer, its learning rate schedule, and the gradient norm."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import GenericAlias
from typing import Any, get_type_hints

import torch
from pydantic import PydanticUserError, TypeAdapter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from whet.base.errors import ConfigError, WhetError
from whet.base.extras import extra
from whet.config.component import ComponentError, import_path
from whet.config.typed import check_type
from whet.learner.model import LearnerModel
from whet.learner.muon import build_muon
from whet.learner.optimizer_config import OptimizerConfig, ParameterGroup
from whet.learner.whole_matrices import WholeMatrices
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import local
from whet.parallel.pipeline import Pipeline

_NOT_HIDDEN = r"embed|lm_head|value_head|wte|wpe|bias$"


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0) out of ``steps``. A run that continues beyond ``steps`` stays
    at the minimum.

    Warm-up: lr (step + 1) / warmup_steps. Then the schedule falls from lr at the first step after the warm-up towards
    min_lr_ratio lr, which it would reach at step ``steps`` (linear, or half a cosine: arXiv 1608.03983).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
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


def _of_class(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    try:
        made: Any = torch.optim.Adafactor if config.type == "adafactor" else import_path(config.type)
    except ComponentError as error:
        raise ConfigError(f"optimizer.type: {error}") from error
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.type = {config.type} is not derived from torch.optim.Optimizer")
    if made.step is torch.optim.Optimizer.step:
        raise ConfigError(f"optimizer.type = {config.type} has no step(), which changes the parameters: define it")
    if made is torch.optim.Muon and any(parameter.ndim != 2 for group in groups for parameter in group["params"]):
        raise ConfigError(
            f"optimizer.type = {config.type} takes matrices only, but other parameters are trained too; set "
            "optimizer.type = muon, which leaves those to AdamW"
        )
    if config.repeats_loss is not None:
        raise ConfigError(config.repeats_loss)
    build: Callable[..., torch.optim.Optimizer] = made
    with _arguments(config):
        _check_settings(made, config)
        optimizer = build(groups, lr=config.lr, **config.settings)
    given, kept = (
        {id(parameter) for group in each for parameter in group["params"]} for each in (groups, optimizer.param_groups)
    )
    if dropped := len(given - kept):
        raise ConfigError(
            f"optimizer.type = {config.type} leaves out {dropped} of the {len(given)} parameters that it gets, which "
            "would never change: give all of them to torch.optim.Optimizer.__init__"
        )
    return optimizer if config.works_on == "numbers" else _gathering(optimizer)


def _gathering(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer, which looks at whole matrices, so that it works on sharded ones."""
    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    return WholeMatrices(optimizer) if sharded else optimizer


def _check_settings(made: type, config: OptimizerConfig) -> None:
    """Raise ``ConfigError`` for a setting whose value has another type than the argument of the class: many classes
    look at it in a step only, or take any text for true."""
    kind: Any = made
    try:
        annotations = get_type_hints(kind.__init__)
    except NameError:  # of a type that is imported for type checkers only
        return
    for name, value in config.settings.items():
        try:
            mapping: Any = GenericAlias(dict, (str, annotations.get(name, Any)))
            adapter = TypeAdapter[Any](mapping, config={"arbitrary_types_allowed": True})
        except PydanticUserError:  # of a type that pydantic can't check
            continue
        try:
            check_type(adapter, {name: value})
        except ValueError as error:
            raise ConfigError(f"optimizer.settings.{error} (an argument of {config.type})") from None


@contextmanager
def _arguments(config: OptimizerConfig) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, LookupError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"optimizer.settings = {config.settings} of {config.type}: {error}") from error


def distributed(made: torch.optim.Optimizer, model: LearnerModel, ranks: Ranks | None) -> torch.optim.Optimizer:
    """Return AdamW, as ``made`` for the parameters of a model of Megatron Core's layers, as its distributed
    optimizer."""
    from whet.parallel.megatron.optimizer import DistributedAdamW

    if ranks is None:
        raise WhetError("learner.distributed_optimizer = true needs several ranks, for instance parallel.fsdp=2")
    tied = None if model.pipeline is None else model.pipeline.tied
    return DistributedAdamW(made, model, model.shards.parameters, ranks, tied)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        scaled = rate * group.get("ratio", 1.0)
        if isinstance(group["lr"], Tensor):  # a compiled step reads the tensor
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the Euclidean norm over all gradients, []."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place."""
    if gradients := [local(p.grad) for p in parameters if p.grad is not None]:  # a stage may have none
        torch._foreach_mul_(gradients, factor)
