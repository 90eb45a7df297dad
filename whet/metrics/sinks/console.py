"""The terminal: a live display where there is one, otherwise one plain line per step (in a log, a pipe, a dumb
terminal). ``NO_COLOR`` is respected by rich."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.metrics.sinks.base import Kind, SinkConfig, Value

if TYPE_CHECKING:
    from rich.console import Console


class ConsoleSink(SinkConfig):
    """Show the run while it runs. ``live``: None decides by looking at the terminal."""

    live: bool | None = None
    refresh_per_second: float = 2.0

    def open(self, folder: Path, recipe: Mapping[str, Any], resume_step: int | None = None) -> "ConsoleWriter":
        from rich.console import Console

        return ConsoleWriter(self, Console(), folder, recipe, resume_step)


class ConsoleWriter:
    """See ``ConsoleSink``. ``status`` says what is being done until the next step is complete."""

    def __init__(
        self,
        config: ConsoleSink,
        console: "Console",
        folder: Path,
        recipe: Mapping[str, Any],
        resume_step: int | None = None,
    ) -> None:
        from rich.live import Live

        from whet.metrics.console import Dashboard
        from whet.metrics.sinks.jsonl import FILE, read_metrics

        self._console = console
        self._dashboard = Dashboard(folder, recipe)
        self._live: Live | None = None
        if resume_step is not None:  # draw the curves from their beginning
            for line in read_metrics(folder / FILE):
                if line["step"] <= resume_step:
                    values = {
                        k: v for k, v in line.items() if k not in ("step", "kind", "not_finite") and v is not None
                    }
                    self._dashboard.add(line["step"], values, line.get("kind", "train"))
        if config.live if config.live is not None else _can_draw(console):
            self._live = Live(
                self._dashboard,
                console=console,
                refresh_per_second=config.refresh_per_second,
                vertical_overflow="crop",
            )
            self._live.start()

    def write(self, step: int, values: Mapping[str, Value], kind: Kind = "train") -> None:
        from whet.metrics.console import plain_line

        self._dashboard.add(step, values, kind)
        if self._live:
            self._live.refresh()
        elif any(not name.startswith("run/") for name in values):
            line = plain_line(step, self._dashboard.facts.steps, values, kind)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def status(self, text: str) -> None:
        self._dashboard.status = text

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None


def _can_draw(console: "Console") -> bool:
    if not console.is_terminal or console.is_dumb_terminal or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    return console.encoding.startswith("utf") and console.width >= 60 and console.height >= 18
