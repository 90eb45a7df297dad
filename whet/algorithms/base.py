"""What an algorithm is: what it learns from, which losses train which role, how rewards become advantages, what is
filtered. A frozen config without a loop: there is one loop, in ``train.py``."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from whet.batch import Output
from whet.config import Config
from whet.data.base import Data
from whet.environments.base import TaskSet
from whet.learner.config import Head, OptimizerConfig
from whet.losses.base import Loss, Unit
from whet.metrics import Metrics
from whet.rollouts.filters import Filter
from whet.types import Group, Weighting

if TYPE_CHECKING:
    from whet.algorithms.credit import AdvantageEstimator
    from whet.batch import Batch
    from whet.learner.base import Scorer
    from whet.models.config import ModelConfig

HEADS: dict[Head, frozenset[Output]] = {
    "language": frozenset({"logprobs", "entropy", "topk"}),
    "value": frozenset({"values"}),
}
"""What a model with such a head can be asked for."""


class Algorithm(Config, ABC):
    """Base of all algorithms."""

    takes: ClassVar[tuple[type[Data], ...]] = (TaskSet,)
    """What the section ``data`` may be."""
    heads: ClassVar[dict[str, Head]] = {"policy": "language"}
    """The models that are trained, by role, the main one first, and what each says about tokens."""
    filled_by: ClassVar[dict[str, tuple[str, str]]] = {
        "old_logprobs": ("policy", "logprobs"),
        "reference_logprobs": ("policy", "reference_logprobs"),
        "values": ("critic", "values"),
    }
    """Which role's learner fills a column of the batch, and what the learner calls it."""
    units: ClassVar[tuple[Unit, ...]] = ("token", "sequence", "group")
    """What its losses may learn from as a whole: ``group`` for pairs, ``sequence`` for judged replies."""

    epochs: int = Field(1, gt=0)
    """How often each step's groups are learned from."""
    minibatches: int = Field(1, gt=0)
    """Optimizer steps per epoch; the step's groups are split among them."""
    weighting: Weighting = "token"
    """A token's share of a step: token mean (DAPO), sequence mean (GRPO as published) or constant (Dr. GRPO)."""

    @property
    def samples_per_task(self) -> int:
        """Samples per task; 0 for algorithms that learn from rows."""
        return 0

    @property
    def frozen(self) -> "dict[str, ModelConfig]":
        """Models that only score, by role: teachers."""
        return {}

    def check_models(self, model: "ModelConfig") -> None:
        """Raises ``ConfigError`` where the run's other models don't fit ``model``, the recipe's."""

    async def consult(self, batch: "Batch", groups: Sequence[Group], learners: "Mapping[str, Scorer]") -> None:
        """Fill what ``filled_by`` can't say: columns that take several models' word, scores of a whole step."""

    @property
    @abstractmethod
    def losses(self) -> "dict[str, Loss]":
        """What trains each role, e.g. ``{"policy": ..., "critic": ...}``."""

    def losses_at(self, step: int) -> "dict[str, Loss]":
        """Those of them that train in step ``step``, counted from 0."""
        return self.losses

    @property
    def main_role(self) -> str:
        """The role whose metrics carry no prefix, and whose weights are what the run is for."""
        return next(iter(self.heads))

    def model_of(self, role: str, shared: "ModelConfig") -> "ModelConfig":
        """What a trained role starts from; ``shared`` is the recipe's."""
        return shared

    def optimizer(self, role: str, shared: OptimizerConfig) -> OptimizerConfig:
        """The settings of a role's optimizer; ``shared`` are the recipe's."""
        return shared

    def updates(self, role: str, steps: int) -> int:
        """Optimizer steps of a role in a run of ``steps`` steps: where its schedule ends."""
        return steps * self.epochs * self.minibatches

    @property
    def estimator(self) -> "AdvantageEstimator | None":
        return None

    @property
    def group_filters(self) -> tuple[Filter, ...]:
        return ()

    @property
    def on_policy(self) -> bool:
        """One optimizer step per rollout: then the old log-probs are the current ones and no pass computes them."""
        return self.epochs * self.minibatches == 1

    @property
    def caches_reference(self) -> bool:
        """Whether the reference scores all rows before the first step, and is then let go."""
        return False

    def weigh(self, batch: "Batch", max_new_tokens: int) -> "Batch":
        """The batch with each token's share of the optimizer step."""
        return batch.weigh(self.weighting, max_new_tokens)

    def report(self, batch: "Batch") -> Metrics:
        """What is worth knowing about a whole step, once its columns are filled."""
        return Metrics()

    @property
    def fills(self) -> frozenset[str]:
        """The columns that losses and advantages may read, because somebody fills them."""
        said = {"rollout_logprobs", "old_logprobs", "reference_logprobs"}
        of_critic = {"values"} if "value" in self.heads.values() else set[str]()
        of_estimator = set[str]()
        if self.estimator is not None:  # returns come with advantages that are measured from a critic's values
            of_estimator = {"advantages", "returns"} if "values" in self.estimator.reads else {"advantages"}
        return frozenset(said | of_critic | of_estimator)

    @property
    def needs(self) -> frozenset[str]:
        """The columns that must be filled before the losses run."""
        needs = frozenset[str]().union(*(loss.reads for loss in self.losses.values()))
        if self.estimator is not None:
            needs |= self.estimator.reads
        if "advantages" in needs and not self.on_policy:
            needs |= {"old_logprobs"}  # a policy loss weighs advantages by exp(lp - lp_old)
        return needs
