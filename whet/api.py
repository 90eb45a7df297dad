"""whet from Python: what ``whet train`` and ``whet resume`` do, for scripts and notebooks.

import whet

folder = whet.start("quickstart", "steps=5", data=MyTasks())
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from whet.base.errors import ConfigError, WhetError
from whet.config import ConfigIssue, RecipeError, load
from whet.config.component import importing
from whet.config.tree import DEFAULT
from whet.models.config import check_models
from whet.run.folder import check_free, new_folder
from whet.run.log import readers_may_go
from whet.run.recipe import Recipe
from whet.run.signals import Stopped, StopRequest

if TYPE_CHECKING:
    from whet.run.open import Opening


def read(recipe: str | Path = "quickstart", *overrides: str, **sections: Any) -> Recipe:
    """Return a recipe by name or path, with ``overrides`` as on the command line (``"optimizer.lr=1e-6"``) and whole
    ``sections`` as values (``data=MyTasks()``, ``steps=5``). Raise ``RecipeError`` naming all that is wrong."""
    loaded = load(Recipe, recipe, overrides)
    try:
        value = Recipe.model_validate({**dict(loaded.value), **sections})
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RecipeError([ConfigIssue(".".join(map(str, one["loc"])), "given", one["msg"]) for one in found]) from None
    value, _ = value.with_implied(lambda key: "algorithm" in sections or loaded.origins.get(key, DEFAULT) != DEFAULT)
    unread = {key: why for key, why in value.unused().items() if key.partition(".")[0] in sections}
    if unread:
        raise RecipeError([ConfigIssue(key, "given", why) for key, why in unread.items()])
    return value


def start(
    recipe: str | Path | Recipe = "quickstart", *overrides: str, folder: str | Path | None = None, **sections: Any
) -> Path:
    """Train from the beginning and return the run folder, with its report in it. ``recipe``, ``overrides`` and
    ``sections`` are those of ``read``; ``folder`` must be new, by default it is one under ``runs/``."""
    if importing():
        raise ConfigError("this file starts a run while it is imported; put that under: if __name__ == '__main__':")
    value = recipe if isinstance(recipe, Recipe) else read(recipe, *overrides, **sections)
    check_models(value)
    if folder is not None:
        check_free(Path(folder))

    name = "run" if isinstance(recipe, Recipe) else Path(recipe).stem
    chosen = new_folder(name=name) if folder is None else Path(folder)

    def train(stop: StopRequest) -> Path:
        from whet.run import run  # takes seconds

        return run.start(value, chosen, stop)

    return _told(f"{name}, {value.steps} steps, into {chosen}", chosen, train)


def open(
    recipe: str | Path | Recipe = "quickstart", *overrides: str, folder: str | Path | None = None, **sections: Any
) -> "Opening":
    """Open a run whose loop is yours; arguments as those of ``start``. Nothing is trained by itself.

    async with whet.open("quickstart") as run:  # or, in a notebook: with whet.open("quickstart") as run
        groups = await run.policy.sample(run.tasks.next(8), n=8)
    """
    value = recipe if isinstance(recipe, Recipe) else read(recipe, *overrides, **sections)
    check_models(value)
    name = "run" if isinstance(recipe, Recipe) else Path(recipe).stem
    if folder is not None:
        check_free(Path(folder))
    chosen = new_folder(name=name) if folder is None else Path(folder)
    from whet.run.open import Opening  # takes seconds
    from whet.show.heartbeat import Heartbeat
    from whet.show.live_report import LiveReport

    return Opening(value, chosen, Heartbeat(f"{name}, into {chosen}"), LiveReport(chosen))


def resume(folder: str | Path, *overrides: str) -> Path:
    """Go on with a run from its newest complete checkpoint and return its folder."""

    def train(stop: StopRequest) -> Path:
        from whet.run import run  # takes seconds

        return run.resume(Path(folder), overrides, stop)

    return _told(f"resuming {folder}", Path(folder), train)


def finished(title: str, folder: Path, train: Callable[[StopRequest], Path]) -> Path:
    """Train into the folder, showing how far it is, write the report, and print what the run amounts to."""
    from whet.show.live_report import shown

    stop = StopRequest()
    with readers_may_go():
        with shown(title, folder):
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                folder = train(stop)
            else:  # a notebook has a loop of its own
                folder = _beside(train, stop)

        from whet.metrics.sinks.jsonl import FILE

        if (folder / FILE).exists():  # no report without the sink that it is made from
            from whet.show.summary import print_summary

            print_summary(folder)
    return folder


def _beside(train: Callable[[StopRequest], Path], stop: StopRequest) -> Path:
    """Train on a thread. An interrupt, which only this thread gets, ends the run after its step, a second one at once;
    raises ``KeyboardInterrupt`` then."""
    thread = ThreadPoolExecutor(1)
    running = thread.submit(train, stop)
    interrupted = False
    try:
        while True:
            try:
                return running.result()
            except KeyboardInterrupt:
                interrupted = True
                if stop.interrupt():
                    print("interrupted: the run saves after this step and ends; interrupt again to end it at once")
    except (Stopped, asyncio.CancelledError) as error:
        if not interrupted:
            raise
        raise KeyboardInterrupt(str(error)) from None
    finally:
        thread.shutdown(wait=False)


def _told(title: str, folder: Path, train: Callable[[StopRequest], Path]) -> Path:
    """Train; what goes wrong is raised without the lines of whet, and with how to go on."""
    try:
        return finished(title, folder, train)
    except KeyboardInterrupt:
        saved = (folder / "checkpoints").is_dir()
        hint = f"Resume with: whet.resume({str(folder)!r})" if saved else f"Nothing is saved in {folder} yet"
        print(f"interrupted. {hint}", flush=True)
        raise KeyboardInterrupt(hint) from None
    except WhetError as error:
        raise error.with_traceback(None) from None
