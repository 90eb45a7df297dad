"""The console sink: a live display in a terminal, or one plain line per step in a log, pipe or dumb terminal. rich
respects ``NO_COLOR``."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.escaping import escape_controls
from whet.base.progress import PROGRESS
from whet.base.strict_json import JsonObject
from whet.metrics.sinks.base import Kind, Sink, SinkConfig, Value, numbers
from whet.metrics.sinks.jsonl import FILE, RESERVED, read_metrics
from whet.show.facts import Measured
from whet.show.metric_catalog import CATALOG, ENTRIES, duration, environments, show

if TYPE_CHECKING:
    from rich.console import Console


# Metrics in every line of a log; others appear only when they are out of bounds.
_ALWAYS = {
    "reward/mean",
    "accuracy",
    "preference/accuracy",
    "loss",
    "answer/length_mean",
    "entropy",
    "kl",
    "gradient_norm",
}


class ConsoleSink(SinkConfig):
    """Prints metrics to the terminal during the run."""

    live: bool | None = None
    """Draw a live display instead of printing a line per step; by default, if the terminal supports it."""
    refresh_per_second: float = 2.0

    def open(self, folder: Path, recipe: JsonObject, resume_step: int | None = None) -> "ConsoleWriter":
        from rich.console import Console

        return ConsoleWriter(self, Console(), folder, recipe, resume_step)


class ConsoleWriter(Sink):
    """The open console; see ``ConsoleSink``."""

    def __init__(
        self,
        config: ConsoleSink,
        console: "Console",
        folder: Path,
        recipe: JsonObject,
        resume_step: int | None = None,
    ) -> None:
        from rich.live import Live

        from whet.show.dashboard import Dashboard

        self._console = console
        self.dashboard = Dashboard(folder, recipe)
        self._live: Live | None = None
        for line in read_metrics(folder / FILE) if resume_step is not None else []:  # earlier steps of the curves
            if line["step"] <= (resume_step or 0):
                values = {k: v for k, v in line.items() if k not in RESERVED and v is not None}
                self.dashboard.add(line["step"], values, line.get("kind", "train"))
        if config.live if config.live is not None else _can_draw(console):
            rate = config.refresh_per_second
            PROGRESS.draw(True)
            self._live = Live(self.dashboard, console=console, refresh_per_second=rate, vertical_overflow="crop")
            self._live.start()
        elif resume_step is not None:
            self._print_facts()

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        self.dashboard.add(step, values, kind)
        if self._live:
            self._live.refresh()
        elif any(not name.startswith(("run/", "time/")) for name in values):
            line = plain_line(step, self.dashboard.facts.steps, values, kind)
            self._print(f"{time.strftime('%H:%M:%S')} {line}")
        elif any(name.startswith("run/") for name in values):
            self._print_facts()

    def _print_facts(self) -> None:
        facts = self.dashboard.facts
        self._print(f"{facts.name}: {facts.line()}", style="bold red" if facts.sandbox else None)

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
        PROGRESS.mark_printed()

    def close(self) -> None:
        if self._live:
            self.dashboard.ended = True
            self._live.transient = self.dashboard.empty  # a run that failed to start has nothing to show
            self._live.stop()
            self._live = None
            PROGRESS.draw(False)


def plain_line(step: int, steps: int | None, values: Mapping[str, Value], kind: Kind = "train") -> str:
    """Format one step as one line, for logs."""
    head = f"step {step}/{steps}" if steps else f"step {step}"
    if kind == "evaluation":
        text = f"{head}  evaluation: {'  '.join(_plain_evaluation(step, values))}"
    else:
        text = "  ".join([head, *_plain_train(values)])
    return escape_controls(text)  # environments choose the names of scores


def _plain_train(values: Mapping[str, Value]) -> Iterator[str]:
    for entry in CATALOG:
        if isinstance(value := values.get(entry.key), str | None):
            continue
        if entry.key in _ALWAYS or (entry.plotted and entry.worrying(value)):
            yield f"{entry.label} {entry.text(value)}{' (!)' if entry.worrying(value) else ''}"
    metrics = numbers(values)
    for entry in environments(metrics):
        yield f"{entry.label} {entry.text(metrics[entry.key])}"
    if "time/step" in metrics:
        yield duration(metrics["time/step"])
    if "time/tokens_per_second" in metrics:
        yield f"{show(metrics['time/tokens_per_second'], 'count')} tokens/s"
    if metrics.get("time/eta"):  # 0 after the last step
        yield f"{duration(metrics['time/eta'])} left"


def _plain_evaluation(step: int, values: Mapping[str, Value]) -> Iterator[str]:
    metrics = numbers(values)
    if measured := Measured.of({"step": step, **metrics}):
        interval = f" (n={measured.n}, 95% {measured.interval})" if measured.n else ""
        yield f"accuracy {show(measured.accuracy, 'percent')}{interval}"
    for name, value in metrics.items():
        short = name.removeprefix("evaluation/")
        if "/" in short and short.endswith("/accuracy"):  # of one task set
            yield f"{short.split('/')[0]} {show(value, 'percent')}"
        elif "/" in short and short.endswith("/loss"):  # of one part of a mixture
            yield f"{short.replace('/', ' ')} {show(value)}"
        elif entry := ENTRIES.get(f"answer/{short}"):
            yield f"{entry.label} {entry.text(value)}"
        elif "/" not in short and short not in ("accuracy", "n", "low", "high"):
            yield f"{short} {show(value)}"


def _can_draw(console: "Console") -> bool:
    if not console.is_terminal or console.is_dumb_terminal or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    return console.encoding.startswith("utf") and console.width >= 60 and console.height >= 18
