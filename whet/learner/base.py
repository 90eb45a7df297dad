"""The interface of a learner, in any role (policy, critic, reward model, teacher) and on any number of ranks."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from whet.cluster.lease import Tenant
from whet.core.batch import Batch
from whet.learner.config import Head, Precision
from whet.losses.base import Loss
from whet.metrics import Metrics
from whet.models.config import ModelConfig
from whet.weights.source import WeightSource

CONSTANT = "learner/constant"  # metric: micro-batches on which the loss had no gradient


@dataclass(slots=True, frozen=True)
class LearnerFacts:
    """The facts of a learner once it is built; the same on all of its ranks."""

    model: ModelConfig  # the model that it was loaded from
    head: Head  # its outputs: log-probs of tokens, or a critic's values
    parameters: int
    trained_parameters: int
    precision: Precision
    matmul_precision: str
    device: str
    hardware: str  # the name of a GPU, empty for a CPU
    ranks: int
    threads: int  # that compute on a rank's CPU
    forest: bool  # sequences can share their prompt, because the attention is whet's
    vocabulary: int  # rows of its output matrix
    steps_done: int  # optimizer steps, as of its last load

    def shown(self) -> dict[str, object]:
        """Return the facts as plain values for display."""
        return asdict(self) | {"model": self.model.path}


class ScorerFacts(Protocol):
    """The facts of any model that scores; see ``LearnerFacts``."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def forest(self) -> bool: ...

    @property
    def vocabulary(self) -> int: ...


@dataclass(slots=True)
class Update:
    """The result of one optimizer step."""

    metrics: Metrics
    logprobs: Tensor  # [N] float32 on the CPU: log-probs of the batch's tokens before the step; 0 where untrained, nan
    # where the forward pass was skipped because of the loss's ``zero_gradient``


@dataclass(slots=True)
class RankUpdate:
    """One rank's result of one optimizer step."""

    loss: float  # summed over this rank's micro-batches
    metrics: Metrics  # the loss's own; additive over ranks
    logprobs: list[Tensor]  # [n] float32 on the CPU, for each micro-batch
    gradient_norm: float  # of the whole step, before clipping; the same on every rank
    lr: float
    skipped: str = ""  # why the step was left out, and where its batch is; empty: it was done


@dataclass(slots=True, frozen=True)
class Top:
    """The number of most likely tokens that a teacher gives at each position."""

    k: int
    below: int  # only ids below this, because the student's output matrix may have fewer rows


class Scorer(Protocol):
    """A model that scores batches, trained or frozen. It gets whole batches, splits them and returns columns in the
    batch's order."""

    @property
    def facts(self) -> ScorerFacts: ...

    async def score(self, batch: Batch, columns: set[str], top: Top | None = None) -> dict[str, Tensor]:
        """Run forward passes only. Columns: ``logprobs``, ``entropy``, ``values``, ``reference_logprobs`` ([N]),
        ``topk`` ([N, K], of the batch's ``topk_ids``; with ``top`` of the most likely tokens, whose ids are then
        ``topk_ids``)."""
        ...


class Learner(Scorer, WeightSource, Tenant, Protocol):
    """A ``Scorer`` that can be trained if it has an optimizer. It provides its weights (by default all, LoRA merged,
    under the names of the plain Hugging Face model; see ``Content``) and shares its devices (awake for scores and
    updates)."""

    @property
    def facts(self) -> LearnerFacts: ...

    flops: float
    """The floating-point operations of all scores and updates so far; see ``ModelFlops``."""

    async def release_reference(self) -> None:
        """Free the reference model. It is loaded again when ``reference_logprobs`` are next requested."""
        ...

    async def update(self, batch: Batch, loss: Loss) -> Update:
        """Run forward and backward passes over micro-batches, then one optimizer step. The batch must be weighed."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer as safetensors plus JSON into an existing folder."""
        ...

    async def begin_save(self, folder: Path) -> None:
        """Start a save that runs in the background: returns once there is a copy. Only one at a time."""
        ...

    async def finish_save(self) -> None:
        """Wait until the background save is written; the learner can do other work meanwhile. Raises its errors."""
        ...

    async def load(self, folder: Path) -> None:
        """Restore exactly what ``save`` wrote. Raises ``WhetError`` if the files belong to another model."""
        ...

    async def begin_profile(self, micro_batches: int) -> None:
        """Begin to record the first rank's computations; see ``ProfileConfig``."""
        ...

    async def end_profile(self, path: Path) -> None:
        """Write the record to a file ``*.json.gz``."""
        ...

    async def close(self) -> None:
        """Shut down the workers and free memory."""
        ...
