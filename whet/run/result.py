"""What is left of a run: its folder, seen from Python."""

import html
import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from whet.config import load
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.run.evaluate import Report, evaluate
from whet.run.recipe import Recipe


class Result(os.PathLike[str]):
    """A run that has ended or is going on, by its folder. ``result / "report.html"`` is a path in it. In a notebook it
    shows its report."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def recipe(self) -> Recipe:
        """The recipe as it was run."""
        return load(Recipe, self.folder / "recipe.yaml").value

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, in order; see docs/metrics.md for their names."""
        return self._lines("train")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The results of each evaluation, in order."""
        return self._lines("evaluation")

    @property
    def report(self) -> Path:
        """The report, a page for browsers."""
        return self.folder / "report.html"

    def table(self) -> Any:
        """Return the metrics as a ``pandas.DataFrame`` with a row for each step. Needs pandas."""
        return importlib.import_module("pandas").DataFrame(self.metrics).set_index("step")

    def model(self) -> Any:
        """Return the model of the best checkpoint (the newest, where none was evaluated) as a ``PreTrainedModel`` in
        float32. Raises ``CheckpointError`` where there is none."""
        from whet.checkpoint.policy import load_policy
        from whet.checkpoint.store import CheckpointStore

        recipe = self.recipe
        return load_policy(CheckpointStore(self.folder / "checkpoints", recipe.checkpoints).load(), recipe.model)

    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        from whet.models.loading import load_tokenizer

        return load_tokenizer(self.recipe.model)

    def evaluate(self, **changes: Any) -> Report:
        """Evaluate the best checkpoint on the held-out tasks. ``changes``: ``split``, ``limit``, ``samples``,
        ``temperature``."""
        return partial(evaluate, self.recipe, run=self.folder)(**changes)

    def _lines(self, kind: str) -> list[dict[str, Any]]:
        steps: dict[int, dict[str, Any]] = {}
        path = self.folder / FILE
        for line in read_metrics(path) if path.exists() else ():
            if line["kind"] == kind and (line["step"] or kind != "train"):
                steps.setdefault(line["step"], {}).update(line)
        return list(steps.values())

    def __fspath__(self) -> str:
        return str(self.folder)

    def __truediv__(self, part: str | Path) -> Path:
        return self.folder / part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, os.PathLike) and os.fspath(self) == os.fspath(other)

    def __hash__(self) -> int:
        raise TypeError("a Result is not hashable; use its folder")

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
