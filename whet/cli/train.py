"""``whet train`` and ``whet resume``."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.errors import ConfigError
from whet.cli.arguments import Overrides, RecipeArgument, print_json, run_folder
from whet.cli.launching import Request
from whet.run.signals import StopRequest

if TYPE_CHECKING:
    from whet.launch.job import Job

ResultAsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and everything else to standard error.")
]


def train(
    context: typer.Context,
    recipe: RecipeArgument,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Run folder to create, instead of a new one under runs/.")
    ] = None,
    as_json: ResultAsJson = False,
) -> None:
    """Train a model as a recipe says. For example: whet train quickstart steps=5"""
    from whet.config import load
    from whet.models.config import check_models
    from whet.run.folder import check_free, new_folder
    from whet.run.recipe import Recipe

    loaded = load(Recipe, recipe, overrides or [])
    check_models(loaded.value)
    run_folder = folder or new_folder(loaded.path.stem)
    check_free(run_folder)
    context.obj.run = run_folder  # only now: the folder of another run has a report of another run

    def begin(stop: StopRequest) -> Path:
        from whet.run import run  # takes seconds

        return run.start(loaded.value, context.obj.run, stop)

    title = f"{loaded.path.stem}, {loaded.value.duration}, into {context.obj.run}"
    _finish(title, context.obj.run, begin, as_json)


def resume(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a run, or the URL of its mirror (checkpoints.mirror).")
    ],
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Run folder to create from a mirror, instead of one under runs/.")
    ] = None,
    as_json: ResultAsJson = False,
) -> None:
    """Continue a run from its newest complete checkpoint."""
    from whet.run.folder import check_resumable

    context.obj.run = local_folder(run, folder)
    check_resumable(context.obj.run)

    def begin(stop: StopRequest) -> Path:
        from whet.run import run as runs  # takes seconds

        return runs.resume(context.obj.run, overrides or [], stop)

    _finish(f"resuming {context.obj.run}", context.obj.run, begin, as_json)


def _finish(title: str, folder: Path, begin: Callable[[StopRequest], Path], as_json: bool) -> None:
    """Train and print the result."""
    from whet.api import finished

    if not as_json:
        print(f"finished: {finished(title, folder, begin)}")
        return
    with redirect_stdout(sys.stderr):
        folder = finished(title, folder, begin)
    from whet.show.runs import RunState

    print_json(RunState.of(folder).as_json())


def _check_local(as_json: bool) -> None:
    if as_json:
        raise ConfigError("--json is for a run on this machine; the state of a job: whet runs --json")


def train_job(
    request: Request,
    recipe: str,
    overrides: list[str] | None = None,
    folder: Path | None = None,
    as_json: bool = False,
) -> "Job":
    """Return the job of ``whet train``: it trains the recipe that is kept with the run, or resumes the run if it has
    begun."""
    from whet.config import dump_yaml, load
    from whet.launch.job import next_folder
    from whet.launch.scripts import sent_recipe
    from whet.run.folder import check_free, new_folder
    from whet.run.recipe import Recipe

    _check_local(as_json)
    loaded = load(Recipe, recipe, overrides or [])
    run = folder or new_folder(loaded.path.stem)
    check_free(run)
    there = request.profile.path_there(run)
    return request.job(
        run,
        sent=("train", sent_recipe(request.profile, next_folder(run.absolute())), "--folder", there),
        again=("resume", there),
        recipe=dump_yaml(loaded.value),
        trains=True,
        saves=loaded.value.checkpoints.before is None,
    )


def local_folder(run: str, folder: Path | None) -> Path:
    """Return the folder of a run, downloaded if ``run`` is the URL of a mirror."""
    from whet.run.folder import from_mirror, is_url

    if is_url(run):
        return from_mirror(run, folder)
    if folder is not None:
        raise ConfigError(f"--folder {folder} is for the URL of a mirror, and {run} is a folder: leave it out")
    return run_folder(Path(run))


def resume_job(
    request: Request,
    run: str,
    overrides: list[str] | None = None,
    folder: Path | None = None,
    as_json: bool = False,
) -> "Job":
    """Return the job of ``whet resume``. A run on a file system that this machine does not see is not checked."""
    from whet.run.folder import is_url

    _check_local(as_json)
    if is_url(run):
        raise ConfigError(f"a job can't resume from the mirror {run}: run `whet resume {run}` on that machine")
    if not request.profile.sees_folder:
        return request.job(Path("runs") / Path(run).name, trains=True)
    sent = ("resume", str(local_folder(run, folder).absolute()), *(overrides or []))
    before = any(word.startswith("checkpoints.before=") for word in sent)
    return request.job(Path(run), sent=sent, trains=True, saves=not before)
