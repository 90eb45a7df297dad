"""``whet train`` and ``whet resume``."""

from pathlib import Path
from typing import Annotated

import typer

from whet.cli.words import Overrides, RecipeArgument, RunArgument, run_folder


def train(
    context: typer.Context,
    recipe: RecipeArgument,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Run folder to create, instead of a new one under runs/.")
    ] = None,
) -> None:
    """Train a model as a recipe says. For example: whet train quickstart steps=5"""
    from whet.api import finished
    from whet.config import load
    from whet.recipe import Recipe
    from whet.run_folder import check_free

    loaded = load(Recipe, recipe, overrides or [])
    if folder is not None:
        check_free(folder)

    from whet import run

    context.obj.run = folder or run.new_folder(name=loaded.path.stem)
    print(f"finished: {finished(lambda: run.start(loaded.value, context.obj.run))}")


def resume(context: typer.Context, run: RunArgument, overrides: Overrides = None) -> None:
    """Go on with a run from its newest complete checkpoint."""
    context.obj.run = run_folder(run)

    from whet import run as runs
    from whet.api import finished

    print(f"finished: {finished(lambda: runs.resume(context.obj.run, overrides or []))}")
