"""``whet view``: shows the answers of a run's model and their grades."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from whet.cli.arguments import AsJson, RunArgument, print_json, run_folder

Sort = Literal["order", "reward", "advantage", "length", "mismatch"]
Only = Literal["correct", "wrong", "completed", "truncated", "failed"]


def view(
    run: RunArgument,
    step: Annotated[int | None, typer.Option("--step", min=0, help="By default the last recorded step.")] = None,
    n: Annotated[int, typer.Option("-n", min=0, help="How many answers to show; 0 shows all.")] = 8,
    sort: Annotated[Sort, typer.Option("--sort", help="Sort by this, the largest first.")] = "order",
    only: Annotated[Only | None, typer.Option("--only", help="Show only answers with this grade or status.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write the timeline of steps and episodes to this file instead, for Perfetto."),
    ] = None,
    html: Annotated[bool, typer.Option("--html", help="Write the run's report.html instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the answers that were sampled in one step of a run."""
    from whet.base.errors import ConfigError

    folder = run_folder(run)
    outputs = [name for name, given in (("--trace", trace), ("--html", html), ("--json", as_json)) if given]
    if len(outputs) > 1:
        raise ConfigError(f"{' and '.join(outputs)} exclude each other; give one of them")
    if (trace or html) and (step, n, sort, only) != (None, 8, "order", None):
        raise ConfigError(f"{outputs[0]} writes the whole run; leave out --step, -n, --sort and --only")
    if trace is not None:
        from whet.show.trace import write_trace

        steps, episodes = write_trace(folder, trace)
        print(f"written: {trace} ({steps} steps, {episodes} episodes); open it at https://ui.perfetto.dev")
        return
    if html:
        from whet.show.report import write_report

        print(f"written: {write_report(folder)}")
    elif as_json:
        from whet.show.view import as_json as rollouts

        print_json(rollouts(folder, step, n or None, sort, only))
    else:
        from whet.show.view import view as show

        show(folder, step=step, n=n or None, sort=sort, only=only)
