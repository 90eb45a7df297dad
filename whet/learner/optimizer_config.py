"""The settings of an optimizer. Imports no torch: recipes are read with this."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from inspect import signature
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from whet.base.strict_json import JsonObject
from whet.config import Config
from whet.config.component import ComponentError, import_path
from whet.config.issues import did_you_mean
from whet.config.typed import check_types
from whet.parallel.config import ParallelConfig

Beta = Annotated[float, Field(ge=0, lt=1)]

OPTIMIZERS = ("adamw", "muon", "adafactor")
ELEMENTWISE = {"SGD", "RMSprop", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD"}
"""Classes of torch.optim that compute each number of a matrix alone, also where it is sharded."""
MATRIXWISE = {"Adafactor", "Muon", "Rprop"}
"""Classes of torch.optim that compute each matrix alone."""


class ParameterGroup(Config):
    """Settings of the parameters whose names a regular expression matches anywhere."""

    match: str
    lr: float | None = Field(None, ge=0)
    """The learning rate after the warm-up; None: ``optimizer.lr``. The schedule is the same."""
    weight_decay: float | None = Field(None, ge=0)
    """None: ``optimizer.weight_decay`` for matrices, 0 for others."""
    freeze: bool = False
    """Don't train these parameters."""

    @field_validator("match")
    @classmethod
    def _compiles(cls, match: str) -> str:
        try:
            re.compile(match)
        except re.error as error:
            raise ValueError(f"{match!r} is not a valid regular expression: {error}") from None
        return match

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.freeze and (idle := [name for name in ("lr", "weight_decay") if getattr(self, name) is not None]):
            raise ValueError(f"freeze = true leaves {' and '.join(idle)} without effect; leave one out")
        return self


@dataclass(frozen=True)
class MuonSettings:
    """The types and limits of ``optimizer.settings`` with ``muon``; torch's Muon has the defaults."""

    momentum: Beta = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: Annotated[float, Field(gt=0)] = 1e-7
    adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = "match_rms_adamw"


@dataclass(frozen=True)
class AdafactorSettings:
    """The types and limits of ``optimizer.settings`` with ``adafactor``; torch's Adafactor has the defaults."""

    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    eps: tuple[Annotated[float, Field(ge=0)] | None, Annotated[float, Field(ge=0)]] = (None, 1e-3)
    d: Annotated[float, Field(ge=1)] = 1.0
    foreach: bool | None = None
    maximize: bool = False


_SETTINGS: dict[str, type] = {"muon": MuonSettings, "adafactor": AdafactorSettings}


class OptimizerConfig(Config):
    """The optimizer with a warm-up and a schedule."""

    bare: ClassVar = "type"

    type: str = "adamw"
    """``adamw`` (arXiv 1711.05101); ``muon`` for hidden matrices and AdamW for the rest (arXiv 2502.16982);
    ``adafactor`` (arXiv 1804.04235); or the path of a class, ``torch.optim:SGD`` or ``my_module:MyOptimizer``, derived
    from torch's Optimizer. On several ranks a class of yours needs ``elementwise = True``, if it computes each number
    alone, or ``matrixwise = True``, if it computes each matrix alone; then each is gathered before it is updated."""
    settings: JsonObject = Field({})
    """Further arguments of ``muon`` (``momentum``, ``nesterov``, ``ns_steps``, ``ns_coefficients``, ``eps``,
    ``adjust_lr_fn``), ``adafactor`` (``beta2_decay``, ``d``, ``eps``, ``foreach``, ``maximize``) or your class."""
    lr: float = Field(1e-6, ge=0)
    """The learning rate after the warm-up."""
    groups: tuple[ParameterGroup, ...] = ()
    """Learning rates, weight decay and freezing of the main model's parameters by name; the first match counts. An
    expression that matches no trained parameter is an error."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's, also where ``muon`` uses it, like ``eps``."""
    eps: float = Field(1e-8, gt=0)
    moments: Literal["float32", "8bit"] = "float32"
    """``8bit``: blocks of 256 one-byte numbers, each block with a scale (arXiv 2110.02861). This saves 6 bytes per
    parameter. On several ranks each matrix is gathered before it is updated. Needs ``whet[torchao]`` and a compiler, as
    ``learner.compile`` does."""
    weight_decay: float = Field(0.0, ge=0)
    """For parameters with two or more dimensions (matrices, embeddings, LoRA's A and B), not for norms or biases."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient of the whole step is clipped to this norm."""
    warmup_steps: int = Field(0, ge=0)
    """The learning rate rises linearly; the first step has ``lr / warmup_steps``."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The schedule after the warm-up, towards ``min_lr_ratio * lr`` at the last step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _fits_type(self) -> Self:
        if self.type not in OPTIMIZERS and ":" not in self.type:
            raise ValueError(
                f"type = {self.type} is not a valid optimizer.{did_you_mean(self.type, OPTIMIZERS)} "
                f"Known: {', '.join(OPTIMIZERS)}; or the path of a class, as in torch.optim:SGD"
            )
        if self.type == "adamw" and self.settings:
            raise ValueError(
                f"settings = {self.settings} are for other types; adamw has lr, betas, eps and weight_decay"
            )
        self._check_settings()
        unused = ["moments"] if self.type == "muon" else ["moments", "betas", "eps"]
        for name, value in self.changed(unused if self.type != "adamw" else ()).items():
            raise ValueError(f"{name} = {value} has no effect with type = {self.type}; leave it out")
        if self.lr == 0 and any(group.lr for group in self.groups):
            raise ValueError("groups: a learning rate follows the schedule of lr, which is 0; set lr above 0")
        return self

    def _check_settings(self) -> None:
        """Raise ``ValueError`` for a setting that another one replaces or, with a type whose settings are known here,
        for one that is unknown or has a wrong value."""
        for name in ("lr", "weight_decay"):
            if name in self.settings:
                raise ValueError(f"settings.{name} has no effect, because optimizer.{name} is used; set that")
        if (kind := _SETTINGS.get(self.type)) is None:
            return
        names = [each.name for each in fields(kind)]
        if unknown := next((name for name in self.settings if name not in names), None):
            raise ValueError(
                f"settings.{unknown} is not a setting of {self.type}.{did_you_mean(unknown, names)} "
                f"Known: {', '.join(names)}"
            )
        try:
            check_types(kind, self.settings)
        except ValueError as error:
            raise ValueError(f"settings.{error}") from None

    def numbers(self, trained: int, hidden: int, vocabulary: int) -> int:
        """Return how many numbers the optimizer keeps for ``trained`` parameters; an upper bound for other types than
        ``adamw``. A class of yours is taken to keep two for each."""
        if self.type == "adafactor":  # a sum for each row and column, and one number for each entry of a vector
            return 4 * trained // hidden
        if self.type == "muon":  # one, but two for embeddings and heads
            return min(2 * trained, trained + 2 * vocabulary * hidden)
        return 2 * trained

    @property
    def works_on(self) -> Literal["numbers", "matrices", "all"]:
        """The part of a model whose gradients decide each update: one number, one matrix, or possibly all."""
        if ":" not in self.type:
            return "numbers" if self.type == "adamw" and self.moments == "float32" else "matrices"
        try:
            made = import_path(self.type)
        except ComponentError:
            return "numbers"  # building it says what is wrong
        module, _, name = self.type.partition(":")
        if (module == "torch.optim" and name in ELEMENTWISE) or getattr(made, "elementwise", False) is True:
            return "numbers"
        of_torch = module == "torch.optim" and name in MATRIXWISE
        return "matrices" if of_torch or getattr(made, "matrixwise", False) is True else "all"

    @property
    def repeats_loss(self) -> str | None:
        """Why the type can't be used, if it is a class that computes the loss again within a step; else None."""
        if ":" not in self.type:
            return None
        try:
            made: Any = import_path(self.type)
            step = signature(made.step)
        except (ComponentError, AttributeError, TypeError, ValueError):
            return None  # building it says what is wrong
        required = [p for p in step.parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
        if len(required) < 2:  # self
            return None
        return (
            f"optimizer.type = {self.type} computes the loss again within a step (its step() needs a "
            f"{required[1].name}), but a step has the gradient of one loss; use {', '.join(OPTIMIZERS)}, or a class "
            "whose step() needs no argument"
        )

    def problems(self, parallel: ParallelConfig, joined: bool = False) -> Iterator[str]:
        """Yield the settings that can't be combined with the learner's ranks. ``joined``: some parameters are several
        matrices of the model in one, as Megatron Core has them."""
        for setting, value in self.changed(("type", "groups", "moments") if joined else ()).items():
            yield (
                f"optimizer.{setting} = {value} needs the matrices of the model one by one, but Megatron Core "
                "joins some; leave it out, or set learner.type=torch"
            )
        if self.repeats_loss is not None:
            yield self.repeats_loss
        elif parallel.ranks > 1 and self.works_on == "all":
            advice = ""
            if not self.type.startswith("torch."):
                advice = (
                    " A class that computes each number from its gradients alone may set elementwise = True, and one "
                    "that computes each matrix from its gradients alone matrixwise = True"
                )
            yield (
                f"optimizer.type = {self.type} may need all parameters at once, but parallel splits them over "
                f"{parallel.ranks} ranks; use {', '.join(OPTIMIZERS)}, or one rank.{advice}"
            )
