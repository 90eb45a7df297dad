"""Early stopping: a run ends when evaluations no longer improve the metric that selects the best checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from whet.base.errors import ConfigError
from whet.base.strict_json import JsonObject


@dataclass(slots=True)
class Patience:
    """Counts evaluations in a row without a better value of a metric."""

    limit: int  # ``evaluation.patience``; 0: the run never ends early
    metric: str
    mode: Literal["max", "min"]
    best: float | None = None
    best_step: int = 0
    waited: int = 0

    @property
    def over(self) -> bool:
        return 0 < self.limit <= self.waited

    def measure(self, step: int, values: Mapping[str, float]) -> bool:
        """Count an evaluation; nothing was measured if it is empty. Return whether its weights are to be kept: the run
        may end early, and it is the best so far. Raises ``ConfigError`` if the metric is not among the values."""
        if not (self.limit and values):
            return False
        value = values.get(self.metric)
        if value is None:
            raise ConfigError(
                f"evaluation.patience looks at checkpoints.best_metric = {self.metric}, which is not measured; "
                f"measured are: {', '.join(values)}"
            )
        sign = 1 if self.mode == "max" else -1
        better = math.isfinite(value) and (self.best is None or sign * value > sign * self.best)
        if better:
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        return better

    def __str__(self) -> str:
        """The reason for the end."""
        best = "was never measured" if self.best is None else f"was best at step {self.best_step} ({self.best:.4g})"
        return f"{self.metric} {best} and has not improved in {self.waited} evaluations"

    def state(self) -> JsonObject:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state(self, state: JsonObject) -> None:
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
