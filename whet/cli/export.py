"""``whet export``: a checkpoint as an ordinary model folder."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from whet.cli.words import RunArgument, run_folder


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to create.")],
    step: Annotated[
        str | None, typer.Option("--step", help="Step of the checkpoint, or 'best'. Without it: the newest.")
    ] = None,
) -> None:
    """Write a run's model as safetensors that transformers and vLLM load."""
    from whet.errors import ConfigError

    folder = run_folder(run)
    which: int | Literal["best"] | None = None
    if step == "best":
        which = "best"
    elif step is not None:
        if not step.isdecimal():
            raise ConfigError(f"--step {step}: expected a whole number or 'best'")
        which = int(step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: it exists and is not empty; name a new folder")

    from whet.checkpoint.export import export as write

    write(folder, out, which)
    print(f"written: {out}")
