"""``whet runs``: lists runs, and compares two of them."""

from pathlib import Path
from typing import Annotated

import typer

from whet.cli.arguments import AsJson, print_json, run_folder


def runs(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER | compare RUN RUN]", help="A folder of runs, or two runs to compare."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison to a page, with all curves.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder (by default runs/), or compare two: whet runs compare runs/a runs/b"""
    from whet.base.errors import ConfigError
    from whet.show.comparison import compare, print_comparison, write_comparison
    from whet.show.runs import RunState, list_runs, print_runs

    words = list(runs or [Path("runs")])
    if words[0] == Path("compare"):
        if len(words) != 3:
            raise ConfigError(f"whet runs compare takes two runs, and was given {len(words) - 1}")
        first, second = (RunState.of(run_folder(run)) for run in words[1:])
        if html is not None:
            write_comparison(first, second, html)
        if as_json:
            print_json(compare(first, second))
            return
        print_comparison(first, second)
        if html is not None:
            print(f"written: {html}")
        return
    if html is not None:
        raise ConfigError("--html belongs to a comparison: whet runs compare A B --html FILE")
    if len(words) > 1:
        raise ConfigError(
            f"whet runs takes one folder of runs, and was given {len(words)}; to compare: whet runs compare A B"
        )
    if as_json:
        print_json(list_runs(words[0]))
    else:
        print_runs(words[0])
