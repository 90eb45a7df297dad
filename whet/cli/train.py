"""``whet train`` and ``whet resume``."""

from pathlib import Path
from typing import Annotated

import typer

from whet.cli.arguments import Overrides, RecipeArgument, RunArgument, run_folder
from whet.run.signals import StopRequest


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
    from whet.models.config import check_models
    from whet.run.folder import check_free, new_folder
    from whet.run.recipe import Recipe

    loaded = load(Recipe, recipe, overrides or [])
    check_models(loaded.value)
    if folder is not None:
        check_free(folder)
    context.obj.run = folder or new_folder(name=loaded.path.stem)

    def begin(stop: StopRequest) -> Path:
        from whet.run import run  # takes seconds

        return run.start(loaded.value, context.obj.run, stop)

    title = f"{loaded.path.stem}, {loaded.value.duration}, into {context.obj.run}"
    print(f"finished: {finished(title, context.obj.run, begin)}")


def resume(context: typer.Context, run: RunArgument, overrides: Overrides = None) -> None:
    """Continue a run from its newest complete checkpoint."""
    from whet.api import finished

    context.obj.run = run_folder(run)

    def begin(stop: StopRequest) -> Path:
        from whet.run import run as runs  # takes seconds

        return runs.resume(context.obj.run, overrides or [], stop)

    print(f"finished: {finished(f'resuming {context.obj.run}', context.obj.run, begin)}")
