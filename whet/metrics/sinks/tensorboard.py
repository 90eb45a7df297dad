"""TensorBoard event files under ``tensorboard/`` in the run folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.extras import extra
from whet.base.files import check_writable
from whet.base.strict_json import JsonObject
from whet.metrics.sinks.base import Kind, Sink, SinkConfig, Value, numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink(SinkConfig):
    """Writes every number as a scalar. View them with ``tensorboard --logdir FOLDER``."""

    def open(self, folder: Path, recipe: JsonObject, resume_step: int | None = None) -> Sink:
        with extra("tensorboard", "the sink tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        check_writable(folder / "tensorboard")  # the writer's thread would print a traceback
        # purge_step hides earlier values of steps that are repeated.
        purge = None if resume_step is None else resume_step + 1
        writer = SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge)
        if resume_step is None:
            writer.add_text("recipe", "    " + json.dumps(recipe, indent=2, default=str).replace("\n", "\n    "), 0)
        return _Writer(writer)


class _Writer(Sink):
    def __init__(self, writer: "SummaryWriter") -> None:
        self._writer = writer
        self._unwritten: dict[int, dict[str, float]] = {}  # of unfinished steps: a value in a file stays there

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        self._unwritten[step] = self._unwritten.get(step, {}) | numbers(values)

    def finish_step(self, step: int) -> None:
        for name, value in self._unwritten.pop(step, {}).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        for step in list(self._unwritten):
            self.finish_step(step)
        self._writer.close()
