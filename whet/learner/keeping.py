"""What a learner's worker has beyond one step: its weights, which it hands out, and its state, which it saves and
loads. Of several ranks all do each of these together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.cluster.base import Seat
from whet.cluster.rendezvous import LOOPBACK
from whet.errors import WhetError
from whet.learner.named_weights import AT_ONCE, ModelWeights
from whet.learner.state import SaveUnderWay, changing, load_state, save_state
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import in_turn
from whet.weights.sender import Sender
from whet.weights.source import Bucket, Handshake, NamedTensors, WeightRequest

if TYPE_CHECKING:
    from whet.learner.scorer import Scorer
    from whet.learner.worker import WorkerConfig
    from whet.parallel.pipeline import Pipeline


@dataclass(slots=True, frozen=True)
class OfAllStages:
    """``NamedTensors`` weights of which each stage of a pipeline holds some."""

    pipeline: "Pipeline"
    own: NamedTensors

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return self.pipeline.described(self.own.described())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.pipeline.in_turn(self.own.tensors())


class Keeping:
    """A part of ``LearnerWorker``, whose attributes these are."""

    config: "WorkerConfig"
    seat: Seat
    device: torch.device
    ranks: Ranks | None
    scorer: "Scorer"
    optimizer: torch.optim.Optimizer | None
    matmul_precision: str
    parameters: int
    trained_parameters: int
    step: int
    skipped: int
    skipped_in_a_row: int
    sender: Sender | None = None  # of weights to generators
    saving: SaveUnderWay | None = None

    @property
    def model(self) -> nn.Module:
        """The language model, or PEFT's wrap of it."""
        return self.scorer.model

    # Weights

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``whet.learner.named_weights``. The value head is not among them. Of several ranks, all must go through
        it together: tensors are gathered when their turn comes, and every rank gets them."""
        return iter(self._weights().tensors())

    def begin_weights(self, request: WeightRequest) -> Handshake:
        """Start to send weights, a bucket at a time; see ``whet.weights.sender``."""
        if self.sender is None:
            host = self.seat.rendezvous.rpartition(":")[0] or LOOPBACK
            self.sender = Sender(self._weights, self.ranks, self.device, self.seat.remote, host)
        return self.sender.begin(request)

    def next_weights(self) -> Bucket | None:
        """The next bucket; None at the end."""
        assert self.sender is not None
        return self.sender.next()

    def end_weights(self) -> None:
        """Whoever took them is done."""
        if self.sender is not None:
            self.sender.end()

    def _weights(self, request: WeightRequest | None = None) -> NamedTensors:
        pipeline = self.scorer.pipeline
        everywhere = request is None or request.every_rank or self.ranks is None or pipeline is not None
        own = ModelWeights(self.model, lambda tensors: in_turn(tensors, self.device, everywhere))
        if request is not None:
            at_once = min(request.bucket_bytes, AT_ONCE)
            own = replace(own, content=request.content, dtype=request.dtype, at_once=at_once)
        return own if pipeline is None else OfAllStages(pipeline, own)

    # State

    def save(self, folder: Path) -> None:
        """Into an existing folder."""
        save_state(folder, self._changing(), self.optimizer, self._facts(), self.ranks)

    def begin_save(self, folder: Path) -> None:
        """The same behind training's back: returns once there is a copy. One at a time; ``finish_save`` ends it."""
        if self.saving is not None:
            raise WhetError("a save is under way already; finish it first")
        self.saving = SaveUnderWay(folder, self._changing(), self.optimizer, self._facts(), self.ranks)

    def save_written(self) -> bool:
        """Whether ``finish_save`` would not have to wait on this rank."""
        return self.saving is None or self.saving.written

    def finish_save(self) -> None:
        """Wait until what was begun is written. Raises on every rank where one of them failed."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.finish(self.config.learner.deadline)

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "matmul_precision": self.matmul_precision,
        }

    def load(self, folder: Path) -> None:
        """Go on exactly where ``save`` was called; a precision of products that was chosen by measuring comes along."""
        facts = load_state(folder, self._changing(), self.optimizer, self.ranks)
        self.step, self.skipped = facts["step"], facts["skipped"]
        self.skipped_in_a_row = facts["skipped_in_a_row"]
        if self.config.learner.matmul_precision == "auto":
            self.matmul_precision = facts["matmul_precision"]
            torch.set_float32_matmul_precision(self.matmul_precision)

    # Room on the device

    def sleep(self) -> None:
        """Let the optimizer's moments go to the CPU and gradients go altogether. The model stays: it is what a
        generator gets its weights from."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self._move_moments(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the moments back."""
        self._move_moments(None)

    def _move_moments(self, device: torch.device | None) -> None:
        """None: to where their parameters are."""
        for parameter, kinds in self.optimizer.state.items() if self.optimizer is not None else ():
            for kind in kinds.keys() - {"step"}:  # that number is where AdamW keeps it
                kinds[kind] = kinds[kind].to(device or parameter.device)

    def _changing(self) -> dict[str, Tensor]:
        modules = {"": self.model, "value_head.": self.scorer.value_head}
        return changing(modules, self.parameters == self.trained_parameters)
