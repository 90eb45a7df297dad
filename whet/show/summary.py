"""The summary of a finished run: accuracy before and after, time, and useful next commands. It is computed from the run
folder, so it can be printed again at any time."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from whet.base.escaping import escape_controls
from whet.base.strict_json import JsonObject
from whet.metrics.rollout_file import rollout_steps
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.show.facts import Change, Measured, Outcome, Summary, read_recipe
from whet.show.metric_catalog import duration, show


def commands(run_folder: Path) -> dict[str, str]:
    """Return useful next commands by name, quoted for a shell."""
    folder = shlex.quote(str(run_folder))
    out = shlex.quote(str(run_folder / "export"))
    sampled, lines = bool(rollout_steps(run_folder)), read_metrics(run_folder / FILE)
    result = {"resume": f"whet resume {folder} {_twice_as_long(run_folder, lines)}"}
    if sampled or any(line.get("kind") == "evaluation" for line in lines):  # otherwise there are no held-out rows
        result["evaluate"] = f"whet eval {folder}"
    if sampled:
        result["view"] = f"whet view {folder}"
    return result | {"export": f"whet export {folder} --out {out}"}


def _twice_as_long(run_folder: Path, lines: Sequence[JsonObject]) -> str:
    """Return the setting that makes a run twice as long, in the unit of its recipe."""
    epochs = read_recipe(run_folder)[1].get("epochs")
    return f"epochs={2 * epochs:g}" if isinstance(epochs, int | float) else f"steps={2 * Summary.of(lines).steps}"


def print_summary(run_folder: Path, console: Console | None = None) -> None:
    """Print the summary panel of a run, then ``commands``, unboxed and unwrapped, so that they can be copied."""
    console = console or Console()
    summary = Summary.of(read_metrics(run_folder / FILE))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("run folder", Text(str(run_folder), style="bold", overflow="fold"))
    if (report := run_folder / "report.html").exists():
        table.add_row("report", Text(str(report), overflow="fold"))
    table.add_row("trained", f"{summary.steps} step{'s' if summary.steps != 1 else ''} in {duration(summary.seconds)}")
    if losses := summary.losses:
        table.add_row("held-out loss", f"{' → '.join(show(each.loss) for each in losses)}   over {losses[-1].n} rows")
    whole = summary.whole
    if whole.before:
        table.add_row("accuracy before" if whole.after else "accuracy", _measured(whole.before))
    if whole.after:
        table.add_row("accuracy after", Text(_measured(whole.after), style="bold"))
    if change := whole.change():
        table.add_row("difference", _change(change))
    for name, outcome in summary.sets.items():
        table.add_row(escape_controls(name), _one_line(outcome))
    console.print(Panel(table, title="whet", title_align="left", box=box.ROUNDED, border_style="#4fc3a1"))
    for name, command in commands(run_folder).items():
        line = Text.assemble((f"  {name:<10}", "dim"), command)
        console.print(line, soft_wrap=True, highlight=False)


def _one_line(outcome: Outcome) -> Text:
    """Return the accuracy before and after, and the difference."""
    shown = [f"{show(m.accuracy, 'percent')} of {m.n}" for m in (outcome.before, outcome.after) if m]
    line = Text(" → ".join(shown))
    change = outcome.change()
    return line.append("   ").append(_change(change)) if change else line


def _measured(result: Measured) -> str:
    size = f" of {result.n}" if result.n else ""
    return f"{show(result.accuracy, 'percent')}{size}   95%: {result.interval}"


def _change(change: Change) -> Text:
    style = {"up": "bold green", "down": "bold red", "": ""}[change.style]
    text = Text(f"{change.points}   95%: {change.interval}", style=style)
    return text if change.style else text.append("   (may be chance)", style="dim")
