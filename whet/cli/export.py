"""``whet export``: a checkpoint as an ordinary model folder."""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from whet.cli.words import RunArgument, run_folder


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to create.")],
    step: Annotated[
        str | None,
        typer.Option(
            "--step", help="Step of the checkpoint, 'best' or 'latest'. Without it: the best, if one was evaluated."
        ),
    ] = None,
) -> None:
    """Write a run's model, or reward model, as a folder that transformers loads."""
    from whet.errors import ConfigError

    folder = run_folder(run)
    if step not in (None, "best", "latest") and not step.isdecimal():
        raise ConfigError(f"--step {step}: expected a whole number, 'best' or 'latest'")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: it exists and is not empty; name a new folder")

    from whet.checkpoint.export import export as write

    write(folder, out, int(step) if step and step.isdecimal() else cast(Literal["best", "latest"] | None, step))
    print(f"written: {out}")
