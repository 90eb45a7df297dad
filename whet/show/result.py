"""A run seen from Python: its metrics, its report, its model."""

import html
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from whet.base.errors import ConfigError
from whet.base.strict_json import JsonObject
from whet.config import load
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.run.recipe import Recipe
from whet.tasks.base import TaskSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from whet.run.evaluation import Changes
    from whet.run.scores import Report
    from whet.run.signals import StopRequest


class Result(os.PathLike[str]):
    """A run, finished or not, given by its folder. ``result / "report.html"`` is a path in the folder. A notebook shows
    the report."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, with all overrides."""
        return load(Recipe, self.folder / "recipe.yaml").value

    @property
    def metrics(self) -> list[JsonObject]:
        """The metrics of each step, in order; docs/metrics.md explains their names."""
        return self._lines("train")

    @property
    def evaluations(self) -> list[dict[str, object]]:
        """The results of each evaluation, in order; step 0 is before training."""
        return self._lines("evaluation")

    @property
    def report(self) -> Path:
        """The path of the report, a page for browsers."""
        return self.folder / "report.html"

    def table(self) -> Any:
        """Return the metrics as a ``pandas.DataFrame`` with a row for each step. Raises ``ConfigError`` without
        pandas."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("table() needs pandas: pip install pandas; without it, use .metrics") from None
        return pandas.DataFrame(self.metrics).set_index("step")

    def model(self) -> "PreTrainedModel":
        """Return the model of the best checkpoint, or of the newest if none was evaluated, as a ``PreTrainedModel`` in
        float32. Raises ``CheckpointError`` if there is no checkpoint."""
        from whet.checkpoint.policy import load_policy
        from whet.checkpoint.store import CheckpointStore

        recipe = self.recipe
        store = CheckpointStore(self.folder / "checkpoints", recipe.checkpoints)
        return store.read(lambda checkpoint: load_policy(checkpoint, recipe.model))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer of the model."""
        from whet.models.loading import load_tokenizer

        return load_tokenizer(self.recipe.model)

    def evaluate(self, **changes: Unpack["Changes"]) -> "Report | dict[str, float]":
        """Measure the best checkpoint, or the newest if none was evaluated, on the held-out tasks, and return a
        ``Report``; ``changes`` are ``split``, ``limit``, ``samples`` and ``temperature``. For a run that learned from
        rows, return the metrics of the held-out rows; ``changes`` are ``split`` and ``limit``."""
        from whet.processes.compute import run_computing
        from whet.run.evaluate_model import evaluate_model
        from whet.run.interrupts import without_loop
        from whet.run.rows_feed import measure_rows
        from whet.show.heartbeat import Heartbeat

        recipe = self.recipe
        samples = isinstance(recipe.data, TaskSet)
        settings = {"split", "limit", *({"samples", "temperature"} if samples else ())}
        if unknown := changes.keys() - settings:
            raise ConfigError(f"evaluate() has no setting {min(unknown)!r} here; it has: {', '.join(sorted(settings))}")

        async def measured(stop: "StopRequest") -> "Report | dict[str, float]":
            stop.cancels_this_task()
            if samples:
                return await evaluate_model(recipe, run=self.folder, **changes)
            evaluation = recipe.evaluation.model_copy(update=changes)
            return await measure_rows(recipe.model_copy(update={"evaluation": evaluation}), self.folder)

        with Heartbeat(f"evaluating {self.folder}"):
            return without_loop(lambda stop: run_computing(measured(stop)))

    def _lines(self, kind: str) -> list[dict[str, object]]:
        lines = read_metrics(self.folder / FILE)
        return [line for line in lines if line["kind"] == kind and (line["step"] or kind != "train")]

    def __fspath__(self) -> str:
        return str(self.folder)

    def __truediv__(self, part: str | os.PathLike[str]) -> Path:
        return self.folder / part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, os.PathLike) and os.fspath(self) == os.fspath(other)

    __hash__ = None  # type: ignore[assignment]  # a path is equal to it, but has another hash

    def __str__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """Return the report as a frame for notebooks."""
        if not self.report.exists():
            return f"<p>{html.escape(str(self))} has no report yet.</p>"
        page = html.escape(self.report.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 0"></iframe>'
