"""The settings of a learner: precision and memory, and the optimizer. Imports no torch: recipes are read with this."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from whet.base.strict_json import JsonObject
from whet.config import Config
from whet.config.component import ComponentError, import_path
from whet.config.issues import did_you_mean
from whet.config.typed import check_types
from whet.core.batch import Output
from whet.models.config import AttentionName, DeviceName, ModelConfig
from whet.parallel.config import ParallelConfig

Precision = Literal["float32", "bfloat16", "float64"]
PrecisionSetting = Literal["auto", "float32", "bfloat16", "float64"]
MatmulPrecision = Literal["auto", "highest", "medium"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Head = Literal["language", "value"]
"""A model's outputs: log-probs of tokens, or a critic's values."""

OUTPUTS: dict[Head, frozenset[Output]] = {
    "language": frozenset({"logprobs", "entropy", "topk", "topk_ids"}),
    "value": frozenset({"values"}),
}
"""The columns that a model can give, by head."""

OPTIMIZERS = ("adamw", "muon", "adafactor")
ELEMENTWISE = {"SGD", "RMSprop", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD"}
"""Classes of torch.optim that compute each number of a matrix alone, also where it is sharded."""
MATRIXWISE = {"Adafactor", "Muon", "Rprop"}
"""Classes of torch.optim that compute each matrix alone."""


class ProfileConfig(Config):
    """Steps whose computations in the main learner torch.profiler records, into ``profile/`` of the run folder."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = Field((), max_length=10)
    """The steps, counted from 1."""
    micro_batches: int = Field(4, ge=1, le=64)
    """Micro-batches that are recorded of scoring, and of learning, in each of the steps: a file grows with every
    operation."""


class LearnerConfig(Config):
    """The settings of training, for all algorithms."""

    type: Literal["torch", "megatron"] = "torch"
    """The implementation of layers. ``torch``: transformers', distributed by torch. ``megatron``: Megatron Core's,
    for Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral and DeepSeek-V3, and for Qwen2.5-VL, Qwen3-VL, InternVL, Idefics 3 and
    SmolVLM with images (``whet[megatron]``)."""
    device: DeviceName = "auto"
    """``auto``: a GPU for each rank if there are any. ``cuda`` is an error without a GPU."""
    attention: AttentionName = "auto"
    """The attention implementation. ``blocks``: padded to blocks of similar size. ``varlen``: unpadded, by
    FlashAttention, a shared prompt's keys once for all its answers. ``flex``: by FlexAttention, on GPUs. ``auto``: in
    bfloat16 on a GPU the first of varlen and flex that the model allows and whose trial at the start agrees with plain
    operations."""
    deterministic: bool = False
    """On a GPU, compute bit-identical results each time, more slowly; an operation that can't raises an error. On CPUs
    results are always bit-identical."""
    precision: PrecisionSetting = "auto"
    """``bfloat16`` computes in bfloat16 (autocast) with float32 weights; ``float64`` is for tests. ``auto``: bfloat16
    on GPUs that support it, and on CPUs that multiply the model's shapes at least 1.5 times as fast in bfloat16 as in
    float32, which is measured for half a second when a run starts; otherwise float32."""
    max_tokens: int = Field(8192, gt=0)
    """Maximum number of tokens in a micro-batch. It bounds memory and doesn't change gradients."""
    pack_tokens: int | None = Field(None, gt=0)
    """Short sequences are packed into micro-batches of at most this many tokens; a longer one is a micro-batch alone.
    Smaller values take less memory. None: ``max_tokens``."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more compute."""
    distributed_optimizer: bool = False
    """With ``megatron``: Megatron Core's distributed optimizer in place of FSDP2. The ranks of ``parallel.fsdp`` and
    ``context`` have whole weights and gradients, and each has the moments of its share. Needs AdamW and float32
    weights."""
    balance: float | None = Field(None, ge=0)
    """Mixtures of experts: how far a step moves each router's bias towards even loads (DeepSeek-V3: 0.001), without an
    auxiliary loss. 0: only reports the loads. Applies to the policy."""
    compile: bool = False
    """Compile layers (torch.compile), except for attention itself: slower to start, faster steps. Needs a C++ compiler
    on CPUs, and can't be combined with parallel.tensor or parallel.expert."""
    float8: bool = False
    """Multiply in float8 in the layers, on GPUs that support it (Ada, Hopper and later), with precision=bfloat16 and
    best with compile. Worthwhile from hidden sizes of about 4,096 on. Needs ``whet[torchao]``."""
    max_skipped_steps: int = Field(3, gt=0)
    """The run stops after this many consecutive steps whose loss or gradient is not finite."""
    matmul_precision: MatmulPrecision = "auto"
    """The precision of float32 products. ``auto`` measures at the start, on a CPU, whether ``medium`` is faster with
    the same accuracy; elsewhere it is ``highest``."""
    deadline: float = Field(1800.0, gt=0)
    """Seconds that one call of a worker (a forward pass over a batch, an optimizer step, a save) may take."""

    @property
    def computes_in(self) -> Precision:
        """The precision, once ``auto`` has been resolved."""
        if self.precision == "auto":
            raise ValueError("learner.precision is auto and has not been resolved yet")
        return self.precision

    def fastest(self, precision: Precision, device: str) -> Precision:
        """Return the fastest precision for this type, where ``precision`` is the fastest for torch. Megatron Core's
        layers have no bfloat16 on CPUs."""
        return "float32" if self.type == "megatron" and device == "cpu" else precision

    def problems(self, parallel: ParallelConfig, lora: bool) -> Iterator[str]:
        """Yield the settings that can't be combined with the learner's ranks, or with LoRA."""
        if self.type == "megatron" and (unsupported := list(self._not_with_megatron(parallel))):
            yield (
                f"learner.type = megatron does not support {', '.join(unsupported)}; leave that out, or set "
                "learner.type=torch"
            )
        if self.distributed_optimizer:
            yield from self._problems_of_distributed_optimizer(parallel)
        if self.float8 and (self.precision not in ("auto", "bfloat16") or parallel.ranks > 1 or lora):
            yield "learner.float8 = true needs precision = bfloat16, one rank, and no LoRA"
        for key, ranks in (("tensor", parallel.tensor), ("expert", parallel.expert)):
            if self.compile and ranks > 1:
                yield (
                    f"learner.compile = true compiles layers, but parallel.{key} = {ranks} splits "
                    "them; leave one of them out"
                )

    def _problems_of_distributed_optimizer(self, parallel: ParallelConfig) -> Iterator[str]:
        what = "learner.distributed_optimizer = true"
        if self.type != "megatron":
            yield f"{what} is Megatron Core's; set learner.type=megatron, or leave it out: parallel.fsdp shards more"
        if parallel.fsdp * parallel.context == 1:
            yield (
                f"{what} shares moments among the ranks of parallel.fsdp and context, but both are 1; set "
                "parallel.fsdp=2 or more, or leave it out"
            )
        if self.precision == "float64":
            yield f"{what} is for weights in float32, not learner.precision = float64; leave one of them out"

    def _not_with_megatron(self, parallel: ParallelConfig) -> Iterator[str]:
        set_here = {"compile": self.compile, "float8": self.float8, "balance": self.balance is not None}
        set_here["deterministic"] = self.deterministic
        set_here[f"attention = {self.attention}"] = self.attention not in ("auto", "blocks")
        yield from (f"learner.{name}" for name, present in set_here.items() if present)
        if parallel.cpu_offload:
            yield "parallel.cpu_offload"


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
                f"Known: {', '.join(OPTIMIZERS)}; or the path of a class"
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


class WorkerConfig(Config):
    """The settings from which a worker of a learner is built."""

    model: ModelConfig
    learner: LearnerConfig = LearnerConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig | None = None
    """None: the model is frozen and only scores."""
    head: Head = "language"
    """The outputs: log-probs of tokens, or a critic's values."""
    steps: int = Field(0, ge=0)
    """Optimizer steps of the whole run, at which a schedule ends."""
    seed: int = 0
    follows_routes: bool = False
    """True for the policy: its routers use the generator's experts if a batch has them."""
    dumps: Path | None = None
    """Folder for dumps of skipped steps, for replay. None: no dumps."""
