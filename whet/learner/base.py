"""The interface of a learner, in any role (policy, critic, reward model, teacher) and on any number of ranks."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from whet.cluster.lease import Tenant
from whet.core.batch import Batch
from whet.learner.config import Head, Precision
from whet.losses.base import Loss
from whet.metrics import Metrics
from whet.models.config import ModelConfig
from whet.weights.source import WeightSource


@dataclass(slots=True, frozen=True)
class LearnerFacts:
    """The facts of a learner once it is built; the same on all of its ranks."""

    model: ModelConfig  # what it was loaded from
    head: Head  # its outputs: log-probs of tokens, or a critic's values
    parameters: int
    trained_parameters: int
    precision: Precision
    matmul_precision: str
    device: str
    ranks: int
    forest: bool  # sequences can share their prompt: its attention is whet's
    vocabulary: int  # rows of its output matrix
    steps_done: int  # optimizer steps, as of its last load

    def shown(self) -> dict[str, Any]:
        """Return them as plain values, for people."""
        return asdict(self) | {"model": self.model.path}


@dataclass(slots=True)
class Update:
    """The result of one optimizer step."""

    metrics: Metrics
    logprobs: Tensor  # [N] float32 on the CPU: log-probs of the batch's tokens before the step; 0 where untrained, nan
    # where the loss's ``zero_gradient`` spared the forward pass


@dataclass(slots=True, frozen=True)
class Top:
    """The number of most likely tokens that a teacher names at each place."""

    k: int
    below: int  # only ids below this: a student whose output matrix is shorter has no others


class Scorer(Protocol):
    """A model that scores batches, trained or frozen. Batches are whole; it cuts them up and puts columns back in order
    by itself."""

    @property
    def facts(self) -> LearnerFacts: ...

    async def score(self, batch: Batch, columns: set[str], top: Top | None = None) -> dict[str, Tensor]:
        """Forward only. Columns: ``logprobs``, ``entropy``, ``values``, ``reference_logprobs`` ([N]), ``topk`` ([N, K],
        of the batch's ``topk_ids``; with ``top`` of the most likely tokens, which are then ``topk_ids``).
        """
        ...


class Learner(Scorer, WeightSource, Tenant, Protocol):
    """A ``Scorer`` that learns where it has an optimizer, hands out its weights (by default all, LoRA merged, under the
    names of the plain Hugging Face model; see ``Content``) and shares its devices (awake for scores and updates)."""

    async def release_reference(self) -> None:
        """Drop the reference model. The learner loads it again when ``reference_logprobs`` are next asked for."""
        ...

    async def update(self, batch: Batch, loss: Loss) -> Update:
        """Forward, backward over micro-batches, one optimizer step. ``batch.weight`` must be set."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer as safetensors plus JSON into an existing folder."""
        ...

    async def begin_save(self, folder: Path) -> None:
        """Start to do the same while training goes on: returns once there is a copy. One at a time."""
        ...

    async def finish_save(self) -> None:
        """Wait until what was begun is written; the learner can do other things meanwhile. Raises what went wrong."""
        ...

    async def load(self, folder: Path) -> None:
        """Restore exactly what ``save`` wrote. Raises ``WhetError`` where the files belong to another model."""
        ...

    async def close(self) -> None:
        """Let go of workers and memory."""
        ...
