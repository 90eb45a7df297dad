"""The sink, a destination of metrics. Values are written once per step, after the metrics of all ranks are merged.

Keys are paths (``clip/high``). Two prefixes have a meaning for every sink: values that depend on the machine or the
time (seconds, tokens per second, memory, timestamps) are under ``time/``, so that runs can be compared without them;
``run/...`` are facts about the run (model, device), shown once and never plotted.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from whet.base.errors import ConfigError
from whet.base.strict_json import JsonObject
from whet.config import Config
from whet.config.entry_points import EntryPoints
from whet.processes.user_code import check_runs, place_of

SINKS = EntryPoints("whet.sinks")
"""The sinks that a recipe can name: the sinks of whet and of every installed distribution."""


Value = float | int | str
Kind = Literal["train", "evaluation"]


class Sink(ABC):
    """An open destination of metrics."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        """Record the values of one step, by metric name. A repeated value replaces the first."""

    def finish_step(self, step: int) -> None:  # noqa: B027
        """Take note that all values and rollouts of a step are written."""

    def close(self) -> None:  # noqa: B027
        """Write buffered values."""


class SinkConfig(Config, ABC):
    """Base of all sinks. A user-defined sink subclasses it and is named by its dotted path."""

    @abstractmethod
    def open(self, folder: Path, recipe: JsonObject, resume_step: int | None = None) -> Sink:
        """Start writing about the run in ``folder``.

        ``recipe`` is the resolved recipe as plain data. ``resume_step`` is the step of the checkpoint from which the
        run resumes, None for a new run. The sink drops its values of later steps, because these are repeated."""


class OpenSinks:
    """Several sinks as one: ``OpenSinks.of(configs, folder, recipe)``. ``close`` closes all, even if one fails."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks, self.closed = list(sinks), False

    @classmethod
    def of(
        cls, configs: Sequence[SinkConfig], folder: Path, recipe: JsonObject, resume_step: int | None = None
    ) -> "OpenSinks":
        with contextlib.ExitStack() as stack:
            sinks = []
            for config in configs:
                sink: object = config.open(folder, recipe, resume_step)
                if not isinstance(sink, Sink):
                    raise ConfigError(
                        f"{place_of(type(config), 'open')} must return an open sink, of a class derived from "
                        f"whet.metrics.sinks.base.Sink, not {sink!r}"
                    )
                for method in ("write", "finish_step", "close"):
                    check_runs(getattr(sink, method), f"{type(sink).__name__}.{method}", awaited=False)
                sinks.append(sink)
                stack.callback(sink.close)
            stack.pop_all()  # all are open: the caller closes them
        return cls(sinks)

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        for sink in self._sinks:
            sink.write(step, dict(values), kind)  # a sink that changes them doesn't change what the next one writes

    def finish_step(self, step: int) -> None:
        for sink in self._sinks:
            sink.finish_step(step)

    def close(self) -> None:
        self.closed = True
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


def numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """Return the values that can be plotted: finite numbers that are not facts about the run."""
    return {
        name: float(value)
        for name, value in values.items()
        if not isinstance(value, str) and not name.startswith("run/") and math.isfinite(value)
    }
