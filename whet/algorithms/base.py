"""The interface of algorithms: the models and the loss that trains each of them, how rewards become advantages, and how
a step is split and weighted. An algorithm is a frozen value and has no loop; the only loop is in ``run/train.py``.

The columns that a step computes follow from what its losses and its estimator read; see also ``dataflow.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from whet.algorithms.advantage import Advantage
from whet.algorithms.registry import AnyFilter
from whet.config import Config
from whet.core.batch import Batch, Output
from whet.core.types import Group, Weighting
from whet.data.base import Data
from whet.learner.config import Head
from whet.learner.optimizer_config import OptimizerConfig
from whet.losses.base import Loss, Unit
from whet.metrics import Metrics
from whet.models.config import ModelConfig
from whet.processes.compute import compute
from whet.rollouts.filters import Filter
from whet.tasks.base import TaskSet

if TYPE_CHECKING:
    from whet.learner.base import Scorer

Scored = Output | Literal["reference_logprobs"]

POLICY: Mapping[str, Scored] = {"old_logprobs": "logprobs", "reference_logprobs": "reference_logprobs"}
"""The columns that a policy fills: its log-probs at the start of the step, and the reference model's. The reference
model has the weights that the run started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One model of an algorithm."""

    loss: Loss | None = None  # None: the model is frozen and only scores
    key: str = "loss"  # the setting that names the loss
    head: Head = "language"
    fills: Mapping[str, Scored] = field(default_factory=dict)  # column of the batch -> output of its learner
    model: ModelConfig | None = None  # its initial weights; None: the recipe's
    inherits_lora: bool = False  # use the LoRA settings of the recipe's model
    lr: float | None = None  # None: the recipe's
    starts_at: int = 0  # the first step in which it is trained
    caches_reference: bool = False  # the reference scores all rows before the first step and is then freed

    def model_config(self, default: ModelConfig) -> ModelConfig:
        """Return the settings of its model; ``default`` is the recipe's model."""
        config = self.model or default
        return config.model_copy(update={"lora": default.lora}) if self.inherits_lora else config

    def optimizer(self, default: OptimizerConfig) -> OptimizerConfig | None:
        """Return the settings of its optimizer, None for a frozen model; ``default`` are the recipe's settings."""
        if self.loss is None:
            return None
        return default if self.lr is None else default.model_copy(update={"lr": self.lr})


class Algorithm(Config, ABC):
    """Base of all algorithms."""

    takes: ClassVar[tuple[type[Data], ...]]
    """The classes that the section ``data`` may have."""
    units: ClassVar[tuple[Unit, ...]] = ("token", "sequence", "group")
    """The units that its losses may have: ``group`` for pairs, ``sequence`` for judged replies."""

    epochs: int = Field(1, gt=0)
    """Number of times that each step's groups are trained on."""
    minibatches: int = Field(1, gt=0)
    """Optimizer steps per epoch; the step's groups are split among them."""
    weighting: Weighting = "token"
    """A token's share of a step: token mean (DAPO), sequence mean (GRPO as published) or constant (Dr. GRPO)."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        from whet.algorithms.dataflow import problems

        for problem in problems(self):
            raise ValueError(problem)
        return self

    @property
    @abstractmethod
    def roles(self) -> dict[str, Role]:
        """The models. The first is the main one: its metrics have no prefix, and its weights are the run's result."""

    @property
    def estimator(self) -> Advantage | None:
        """The estimator that turns rewards into advantages."""
        return None

    @property
    def fills(self) -> frozenset[str]:
        """The columns that its own ``prepare`` fills, in addition to the columns of its roles and its estimator."""
        return frozenset()

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Scorer]) -> Metrics:
        """Fill the columns that losses and estimator read in the batch of a whole step, made from ``groups``: first the
        outputs of the roles' learners, then the advantages. Return the step's metrics.

        Your own algorithm fills its columns before or after this, and names them in ``fills``:

            async def prepare(self, batch, groups, learners):
                batch.fill("length", batch.trained_per_sequence.double(), axis="sequence")
                return await super().prepare(batch, groups, learners)
        """
        missing = self.reads - batch.filled
        for name, role in self.roles.items():
            if outputs := {column: role.fills[column] for column in sorted(missing & role.fills.keys())}:
                scored = await learners[name].score(batch, set(outputs.values()))
                for column, output in outputs.items():
                    batch.fill(column, scored[output])
        if self.estimator is not None:
            credit = await compute(self.estimator.credit, batch)
            credit.fill(batch)
        return Metrics()

    def check_models(self, model: ModelConfig) -> None:
        """Raise ``ConfigError`` if its other models are not compatible with ``model``, the recipe's."""

    async def check_servers(self, model: ModelConfig, longest: int | None) -> None:
        """Raise ``ConfigError`` if a server that has one of its other models is missing or can't score texts of
        ``longest`` tokens (None: unknown)."""

    # Derived from the above

    @property
    def losses(self) -> dict[str, Loss]:
        """The loss of each role that is trained."""
        return {name: role.loss for name, role in self.roles.items() if role.loss is not None}

    def losses_at(self, step: int) -> dict[str, Loss]:
        """Return the losses that train in step ``step``, counted from 0."""
        return {name: loss for name, loss in self.losses.items() if step >= self.roles[name].starts_at}

    @property
    def main_role(self) -> str:
        return next(iter(self.roles))

    @property
    def main(self) -> Role:
        return self.roles[self.main_role]

    @property
    def on_policy(self) -> bool:
        """True for one optimizer step per rollout: the old log-probs are then the current ones and need no pass."""
        return self.epochs * self.minibatches == 1

    @property
    def reads(self) -> frozenset[str]:
        """The columns that must be filled before the losses run."""
        reads = frozenset[str]().union(*(loss.reads for loss in self.losses.values()))
        if self.estimator is not None:
            reads |= self.estimator.reads
        if "advantages" in reads and not self.on_policy:
            reads |= {"old_logprobs"}  # a policy loss weights advantages by exp(lp - lp_old)
        return reads


class OnlineAlgorithm(Algorithm):
    """Base of the algorithms that train on answers sampled from their policy."""

    takes: ClassVar[tuple[type[Data], ...]] = (TaskSet,)
    units: ClassVar[tuple[Unit, ...]] = ("token", "sequence")

    group_size: int = Field(8, gt=0)
    """Answers per task."""
    filters: tuple[AnyFilter, ...] = ()
    """Filters that are applied to groups between grading and training."""

    @property
    def pairing(self) -> tuple[Filter, ...]:
        """Filters that its loss needs after all others, which an environment of a blend can't replace."""
        return ()
