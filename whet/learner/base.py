"""What a learner is, whatever its role (policy, critic, reward model, teacher) and however many ranks it spans."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from whet.batch import Batch
from whet.losses.base import Loss
from whet.metrics import Metrics
from whet.models.config import ModelConfig
from whet.weights.parcel import Opening, Parcel, Sending


@dataclass(slots=True)
class Update:
    """What one optimizer step returns."""

    metrics: Metrics
    logprobs: Tensor  # [N] float32 on the CPU: log-probs of the batch's tokens before the step; 0 where untrained


@dataclass(slots=True, frozen=True)
class Top:
    """How many of its likeliest tokens a teacher names at each place."""

    k: int
    below: int  # only ids below this: a student whose output matrix is shorter has no others


class Learner(Protocol):
    """A model that scores batches and, where it has an optimizer, learns. Batches are whole; cutting them up and
    putting columns back in order is the learner's business."""

    @property
    def model(self) -> ModelConfig:
        """What it was loaded from."""
        ...

    async def score(self, batch: Batch, columns: set[str], top: Top | None = None) -> dict[str, Tensor]:
        """Forward only. Columns: ``logprobs``, ``entropy``, ``values``, ``reference_logprobs`` ([N]), ``topk``
        ([N, K], of the batch's ``topk_ids``; with ``top`` of the likeliest tokens, which are then ``topk_ids``).
        """
        ...

    async def release_reference(self) -> None:
        """Let go of the reference model. Asked for ``reference_logprobs`` again, the learner loads it again."""
        ...

    async def update(self, batch: Batch, loss: Loss) -> Update:
        """Forward, backward over micro-batches, one optimizer step. ``batch.weight`` must be set."""
        ...

    async def begin_weights(self, sending: Sending) -> Opening:
        """Start to hand out the current weights: by default all, LoRA merged, under the names of the plain Hugging Face
        model; see ``Content``."""
        ...

    async def next_weights(self) -> Parcel | None:
        """The next bucket of them, as ``begin_weights`` was told; None at the end."""
        ...

    async def end_weights(self) -> None:
        """Whoever took them is done."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer as safetensors plus JSON into an existing folder."""
        ...

    async def begin_save(self, folder: Path) -> None:
        """The same behind training's back: returns once there is a copy. One at a time."""
        ...

    async def finish_save(self) -> None:
        """Return when what was begun is written; the learner can do other things meanwhile. Raises what went wrong."""
        ...

    async def load(self, folder: Path) -> None:
        """Go on exactly where ``save`` was called. Raises ``WhetError`` where the files belong to another model."""
        ...

    async def close(self) -> None:
        """Let go of workers and memory."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for people: parameters, trainable parameters, dtype, device, speed settings."""
        ...
