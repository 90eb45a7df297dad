"""What an algorithm is: its models and the loss that trains each, how rewards become advantages, how a step is cut up
and weighed. A frozen value without a loop: there is one loop, in ``train.py``.

What is computed in a step follows from what its losses and its estimator read; see also ``dataflow.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from whet.algorithms.advantage import Advantage
from whet.algorithms.parts import AnyFilter
from whet.config import Config
from whet.core.batch import Batch, Output
from whet.core.types import Group, Weighting
from whet.data.base import Data
from whet.learner.config import Head, OptimizerConfig
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
"""What a policy fills: its log-probs at the start of the step, and those of the model that the run started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One model of an algorithm."""

    loss: Loss | None = None  # what trains it; None: it is frozen and only scores
    key: str = "loss"  # the setting that the loss comes from
    head: Head = "language"
    fills: Mapping[str, Scored] = field(default_factory=dict)  # column of the batch -> what its learner is asked for
    model: ModelConfig | None = None  # what it starts from; None: the recipe's
    inherits_lora: bool = False  # has adapters as the recipe's model has them
    lr: float | None = None  # None: the recipe's
    starts_at: int = 0  # the first step that trains it
    caches_reference: bool = False  # its start scores all rows before the first step, and is then let go

    def model_beside(self, shared: ModelConfig) -> ModelConfig:
        """Return what it starts from; ``shared`` is the recipe's model."""
        own = self.model or shared
        return own.model_copy(update={"lora": shared.lora}) if self.inherits_lora else own

    def optimizer(self, shared: OptimizerConfig) -> OptimizerConfig | None:
        """Return the settings of its optimizer, None for a frozen one; ``shared`` are the recipe's."""
        own = shared if self.lr is None else shared.model_copy(update={"lr": self.lr})
        return None if self.loss is None else own


class Algorithm(Config, ABC):
    """Base of all algorithms."""

    takes: ClassVar[tuple[type[Data], ...]]
    """What the section ``data`` may be."""
    units: ClassVar[tuple[Unit, ...]] = ("token", "sequence", "group")
    """What its losses may learn from as a whole: ``group`` for pairs, ``sequence`` for judged replies."""

    epochs: int = Field(1, gt=0)
    """How often each step's groups are learned from."""
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
        """Its models. The first is the main one: its metrics carry no prefix, and a run is there for its weights."""

    @property
    def estimator(self) -> Advantage | None:
        """How rewards become advantages."""
        return None

    @property
    def fills(self) -> frozenset[str]:
        """The columns that its own ``prepare`` fills, beside those of its roles and its estimator."""
        return frozenset()

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Scorer]) -> Metrics:
        """Fill what losses and estimator read in the batch of a whole step, made from ``groups``: what the roles'
        learners say, then the advantages. Return what is worth knowing about the step.

        An algorithm of your own fills its columns before or after, and names them in ``fills``:

            async def prepare(self, batch, groups, learners):
                batch.fill("length", batch.trained_per_sequence.double(), axis="sequence")
                return await super().prepare(batch, groups, learners)
        """
        missing = self.reads - batch.filled
        for name, role in self.roles.items():
            if wanted := {column: role.fills[column] for column in sorted(missing & role.fills.keys())}:
                scored = await learners[name].score(batch, set(wanted.values()))
                for column, output in wanted.items():
                    batch.fill(column, scored[output])
        if self.estimator is not None:
            credit = await compute(self.estimator.estimate, batch)
            batch.advantages, batch.returns = credit.advantages, credit.returns
        return Metrics()

    def check_models(self, model: ModelConfig) -> None:
        """Raise ``ConfigError`` where its own models don't fit ``model``, the recipe's."""

    # What follows from the above

    @property
    def losses(self) -> dict[str, Loss]:
        """What trains each role that is trained."""
        return {name: role.loss for name, role in self.roles.items() if role.loss is not None}

    def losses_at(self, step: int) -> dict[str, Loss]:
        """Return those that train in step ``step``, counted from 0."""
        return {name: loss for name, loss in self.losses.items() if step >= self.roles[name].starts_at}

    @property
    def main_role(self) -> str:
        return next(iter(self.roles))

    @property
    def main(self) -> Role:
        return self.roles[self.main_role]

    @property
    def on_policy(self) -> bool:
        """One optimizer step per rollout: then the old log-probs are the current ones and no pass computes them."""
        return self.epochs * self.minibatches == 1

    @property
    def reads(self) -> frozenset[str]:
        """The columns that must be filled before the losses run."""
        reads = frozenset[str]().union(*(loss.reads for loss in self.losses.values()))
        if self.estimator is not None:
            reads |= self.estimator.reads
        if "advantages" in reads and not self.on_policy:
            reads |= {"old_logprobs"}  # a policy loss weighs advantages by exp(lp - lp_old)
        return reads


class OnlineAlgorithm(Algorithm):
    """Base of those that learn from answers that their policy samples."""

    takes: ClassVar[tuple[type[Data], ...]] = (TaskSet,)
    units: ClassVar[tuple[Unit, ...]] = ("token", "sequence")

    group_size: int = Field(8, gt=0)
    """Answers per task."""
    filters: tuple[AnyFilter, ...] = ()
    """What happens to groups between grading and learning."""

    @property
    def pairing(self) -> tuple[Filter, ...]:
        """What its loss needs done to every group after all other filters, which an environment of a blend can't
        replace."""
        return ()
