"""Arguments and options that several commands share, and the target that is either a task set or a recipe."""

import logging
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

if TYPE_CHECKING:
    from typer.models import ArgumentInfo

    from whet.config.issues import ConfigIssue
    from whet.run.recipe import Recipe

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Name of a recipe (see: whet recipes) or path of a YAML file.")
]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, as in runs/quickstart-20260131-120000.")
]


def changes(example: str) -> "ArgumentInfo":
    """Return the declaration of an argument that changes settings, with an example that its command takes."""
    return typer.Argument(metavar="KEY=VALUE", help=f"Settings to change, as in {example}.")


Overrides = Annotated[list[str] | None, changes("optimizer.lr=1e-6")]
TaskOverrides = Annotated[list[str] | None, changes("digits=2 for a task set, data.digits=2 for a recipe")]
SamplingOverrides = Annotated[list[str] | None, changes("sampling.max_new_tokens=256")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


_OF_TRAINING = ("optimizer", "profile", "sinks")  # sections that only training reads

log = logging.getLogger(__name__)


@dataclass
class Session:
    """State shared by a command and its error handling, as ``context.obj``."""

    debug: bool = False
    run: Path | None = None  # the run folder, once it is chosen
    again: str = ""  # a command that continues the work, if it is not "whet resume" of the run
    words: tuple[str, ...] = ()  # of the command line
    signals: list[signal.Signals] = field(default_factory=list)  # signals that came and were handled as interrupts


def print_json(value: object) -> None:
    """Print a value for ``--json``."""
    import json

    print(json.dumps(value, indent=2, ensure_ascii=not in_unicode(sys.stdout)))


def in_unicode(stream: TextIO) -> bool:
    """Return whether every character can be written to a stream."""
    return (stream.encoding or "utf-8").lower().startswith("utf")


def quoted(text: str) -> str:
    """Return a text as the value of a setting: a folder may be called ``#1`` or ``null``."""
    import json

    return json.dumps(text, ensure_ascii=False)


def warn_of_unread(changes: list[str], further: tuple[str, ...] = ()) -> None:
    """Warn of changed settings that only training reads, or that are in ``further`` sections which the command does
    not read. Not an error, because several commands are given the same settings, which also have to fit together."""
    for change in changes:
        section = change.partition("=")[0].partition(".")[0]
        if section in (*_OF_TRAINING, *further):
            log.warning("%s has no effect: this command does not read %s", change, section)


def run_folder(run: Path) -> Path:
    """Return the folder if it is a run. Otherwise raises ConfigError with the most similar run name."""
    from whet.base.errors import ConfigError
    from whet.config.issues import did_you_mean
    from whet.config.loading import runs_in

    if (run / "recipe.yaml").is_file():
        return run
    inside = runs_in(run) if run.is_dir() else []  # runs/ in place of runs/NAME
    folder, runs = (run, inside) if inside else (run.parent, runs_in(run.parent))
    what = "not a run: it contains no recipe.yaml" if run.is_dir() else "there is no such run folder"
    what = "a file, and the folder of a run is needed" if run.is_file() else what
    listed = f" Runs in {folder}: {', '.join(runs[:10])}." if runs else ""
    raise ConfigError(f"{run}: {what}.{'' if inside else did_you_mean(run.name, runs)}{listed}")


def recipe_of(target: str, changes: list[str]) -> "Recipe":
    """Return the recipe ``target`` with ``changes``, or for a task set a recipe of it with these settings of it and
    otherwise its own defaults."""
    from whet.base.errors import ConfigError
    from whet.config import load
    from whet.config.issues import RecipeError, nearest
    from whet.config.loading import load_overrides, recipe_names
    from whet.run.recipe import Recipe
    from whet.tasks.base import TASK_SETS

    if target in TASK_SETS or ":" in target:
        settings = [f"data={quoted(target)}", *(f"data.{change}" for change in changes)]
        try:
            return load_overrides(Recipe, [*settings, "model=smollm2-135m-instruct", "algorithm=grpo", "steps=1"])
        except RecipeError as error:  # the user has written no ``data.``
            raise RecipeError([_of_task_set(issue, target, changes) for issue in error.issues]) from None
    near = nearest(target, [*TASK_SETS, *recipe_names()])
    if near in TASK_SETS and not Path(target).exists():
        raise ConfigError(
            f"{target!r} is not a task set, a recipe or a run folder. Did you mean the task set {near!r}?"
        )
    recipe = load(Recipe, target, changes).value
    warn_of_unread(changes)
    return recipe


def _of_task_set(issue: "ConfigIssue", target: str, changes: list[str]) -> "ConfigIssue":
    """Return a mistake in the settings of a task set with the key and the place that the user has written."""
    from dataclasses import replace

    written = {f"override {n + 1} (data.{change})": f"override {n} ({change})" for n, change in enumerate(changes, 1)}
    where = ({f"override 1 (data={quoted(target)})": target} | written).get(issue.where, issue.where)
    key = issue.key.removeprefix("data.")
    return replace(issue, key=key, where=where, message=issue.message.replace(f"{issue.key}=", f"{key}="))
