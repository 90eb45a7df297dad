"""Steps whose loss or gradient is not finite. Such a step is skipped; its micro-batches are dumped, so that the cause
can be found (``LearnerWorker.replay``), and too many consecutive ones stop the run. No weight is changed here."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from whet.base.errors import WhetError
from whet.core.packing import MicroBatch
from whet.learner.dump import write_dump
from whet.learner.state import Progress
from whet.losses.base import Loss
from whet.parallel.mesh import Ranks, fail_together
from whet.parallel.parameters import first_not_finite


@dataclass(slots=True, frozen=True)
class SkippedStep:
    """One rank's facts of a skipped step. ``gradients`` are this rank's gradients, by name."""

    progress: Progress
    loss: float  # of the whole step
    gradient_norm: float
    micro_batches: Sequence[MicroBatch]
    gradients: Iterable[tuple[str, Tensor]]

    @property
    def problem(self) -> str:
        if not math.isfinite(self.loss):
            return f"the loss ({self.loss})"
        return f"the norm of the gradient ({self.gradient_norm})"

    def dump(self, dumps: Path, loss: Loss, ranks: Ranks | None) -> Path:
        """Write the micro-batches of this rank's shard into a new folder of ``dumps``, and return it. With several
        ranks all call it together."""
        info = None if ranks is None or ranks.info.shards == 1 else ranks.info
        name = f"step-{self.progress.step:06d}-{self.progress.skipped:03d}"
        folder = dumps / (name if info is None else f"{name}-shard-{info.shard}")
        not_finite = first_not_finite(self.gradients)
        if ranks is not None:
            not_finite = next(filter(None, ranks.all_gather(not_finite)), None)
        facts = {
            "what": f"{self.problem} is not finite",
            "step": self.progress.step,
            "loss": str(self.loss),
            "gradient_norm": str(self.gradient_norm),
            "not_finite": not_finite,
            "settings": repr(loss),
        }
        with fail_together(ranks, "writing a dump"):
            if ranks is None or ranks.is_shard_leader:
                write_dump(folder, self.micro_batches, facts)
        return folder

    def described(self, folder: Path | None) -> str:
        """Return what a warning says. ``folder`` has the dump."""
        return f"{self.problem} is not finite, so weights and moments stay as they are; {_where(folder)}"

    def check(self, limit: int, folder: Path | None) -> None:
        """Raise ``WhetError`` after ``limit`` consecutive skipped steps. ``folder`` has the dump of the last one."""
        if self.progress.skipped_in_a_row >= limit:
            where = _where(folder)
            raise WhetError(
                f"{self.problem} was not finite in {self.progress.skipped_in_a_row} optimizer steps in a row, the last "
                f"one being step {self.progress.step}; {where}. Lower optimizer.lr, or look at that batch with "
                "LearnerWorker.replay"
            )


def _where(folder: Path | None) -> str:
    return "set a folder for dumps to keep its batch" if folder is None else f"its batch is in {folder}"
