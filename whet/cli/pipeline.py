"""``whet pipeline``: runs stages one after another."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import AsJson, changes, print_json

if TYPE_CHECKING:
    from whet.pipeline.execute import Outcome


def pipeline(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="PIPELINE", help="A YAML file of stages, or a name: see --list.")] = "",
    overrides: Annotated[list[str] | None, changes("stages.sft.settings.steps=5")] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", "-c", help="A profile of the file, as in -c tiny.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="The pipeline's folder; by default runs/NAME or runs/NAME-PROFILE.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Only this stage and all that depend on it.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Only this stage.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also run stages that are up to date.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and why; run nothing.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the pipelines of the package.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the stages of a pipeline that are not up to date. For example: whet pipeline rlhf -c tiny"""
    from dataclasses import asdict

    from whet.base.errors import ConfigError
    from whet.config import list_recipes
    from whet.pipeline.config import SHIPPED

    if list_all and file:
        raise ConfigError(
            f"--list takes no other words, and got {shlex.join([file, *(overrides or [])])}; leave them out"
        )
    if list_all or not file:
        descriptions = list_recipes(SHIPPED)
        if not list_all:
            raise ConfigError(f"name a pipeline: a YAML file, or one of {', '.join(descriptions)}")
        if as_json:
            print_json(descriptions)
        else:
            print("\n".join(f"{name:<20}  {text}" for name, text in descriptions.items()))
        return

    from whet.pipeline.config import load_pipeline
    from whet.pipeline.execute import execute, planned
    from whet.pipeline.graph import build
    from whet.pipeline.plan import selected
    from whet.pipeline.state import FILE

    loaded = load_pipeline(file, overrides or [], profile)
    name = loaded.path.stem + (f"-{profile}" if profile else "")
    folder = (folder or Path("runs") / name).resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--folder {folder} is not a folder; name one, or a new one")
    if (folder / "recipe.yaml").is_file() and not (folder / FILE).is_file():
        raise ConfigError(f"--folder {folder} is the folder of a run; name another one for the pipeline")
    jobs = build(loaded, folder)
    chosen = selected(jobs, start, only)
    if dry_run:
        outcomes = planned(jobs, folder, chosen, force=force)
        if as_json:
            print_json([asdict(each) for each in outcomes])
        else:
            _print_plan(outcomes)
        return
    given = [file, *(overrides or []), *(["-c", profile] if profile else []), "--folder", str(folder)]
    context.obj.again = f"whet pipeline {shlex.join(given)}"

    def say(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    outcomes = execute(jobs, folder, chosen, force=force, quiet=as_json, say=say)
    if as_json:
        print_json([asdict(each) for each in outcomes])
    else:
        _print_summary(outcomes, folder)


def _print_plan(outcomes: "list[Outcome]") -> None:
    for number, each in enumerate(outcomes, 1):
        why = f": {each.why}" if each.why else ""
        print(f"{number}. {each.name} ({each.type}): {each.action}{why}")
        if each.action in ("run", "continue"):
            print(f"   {each.command}")


def _print_summary(outcomes: "list[Outcome]", folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from whet.base.escaping import escape_controls
    from whet.show.metric_catalog import duration

    table = Table("stage", "type", "this time", "took", "result")
    for each in outcomes:
        done = {"run": "run", "continue": "continued"}.get(each.action, each.action)
        table.add_row(each.name, each.type, done, duration(each.seconds), escape_controls(each.result))
    console = Console()
    console.print(table)
    print(f"each stage is a folder in {folder}")
