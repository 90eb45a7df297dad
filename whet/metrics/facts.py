"""Who is being trained on what: the few facts at the head of the console and the report, from a resolved recipe.

Reads the recipe as plain data and takes whatever is there, so that it also reads the folders of other versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.metrics.catalog import show


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Empty or None where the recipe and the metrics don't say."""

    name: str
    model: str = ""
    task: str = ""
    algorithm: str = ""
    device: str = ""
    parameters: float | None = None
    steps: int | None = None

    @classmethod
    def of(cls, folder: Path, recipe: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> "RunFacts":
        """Facts among the metrics (``run/model``, ``run/parameters``, ``run/device`` ...) win over the recipe: they
        say what was really loaded."""
        known = {k.removeprefix("run/"): v for k, v in (values or {}).items() if k.startswith("run/")}

        def text(name: str, *paths: str) -> str:
            return str(known.get(name) or _first(recipe, *paths) or "")

        steps = known.get("steps") or _first(recipe, "steps", "train.steps", "run.steps", "max_steps")
        parameters = known.get("parameters")
        return cls(
            name=text("name", "name", "run.name") or folder.resolve().name,
            model=_short(text("model", "model.name", "model.path", "model.id", "model.type", "model")),
            task=text("task", "data.name", "data.type", "environment.type", "task.type", "data", "environment"),
            algorithm=text("algorithm", "algorithm.name", "algorithm.type", "algorithm"),
            device=text("device", "device", "cluster.device", "model.device"),
            parameters=float(parameters) if isinstance(parameters, int | float) else None,
            steps=int(steps) if isinstance(steps, int | float) else None,
        )

    def line(self) -> list[str]:
        """The facts in order, those that are known."""
        size = f"{show(self.parameters, 'count')} parameters" if self.parameters else ""
        return [part for part in (self.model, self.task, self.algorithm, size, self.device) if part]


def _first(recipe: Mapping[str, Any], *paths: str) -> Any:
    for path in paths:
        here: Any = recipe
        for key in path.split("."):
            here = here.get(key) if isinstance(here, Mapping) else None
        if isinstance(here, str | int | float) and here != "":
            return here
    return None


def _short(model: str) -> str:
    """The last part: neither the owner nor a path on a disk is worth the room."""
    return Path(model).name or model
