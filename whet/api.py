"""whet from Python: what ``whet train`` and ``whet resume`` do, for scripts and notebooks.

import whet

folder = whet.start("quickstart", "steps=5", data=MyTasks())
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from whet.config import Problem, RecipeError, load
from whet.config.tree import DEFAULT
from whet.recipe import Recipe
from whet.run_folder import check_free


def read(recipe: str | Path = "quickstart", *overrides: str, **sections: Any) -> Recipe:
    """Return a recipe by name or path, with ``overrides`` as on the command line (``"optimizer.lr=1e-6"``) and whole
    ``sections`` as values (``data=MyTasks()``, ``steps=5``). Raise ``RecipeError`` naming all that is wrong."""
    loaded = load(Recipe, recipe, overrides)
    try:
        value = Recipe.model_validate({**dict(loaded.value), **sections})
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RecipeError([Problem(".".join(map(str, one["loc"])), "given", one["msg"]) for one in found]) from None
    value, _ = value.completed(lambda key: "algorithm" in sections or loaded.origins.get(key, DEFAULT) != DEFAULT)
    unread = {key: why for key, why in value.unread().items() if key.partition(".")[0] in sections}
    if unread:
        raise RecipeError([Problem(key, "given", why) for key, why in unread.items()])
    return value


def start(
    recipe: str | Path | Recipe = "quickstart", *overrides: str, folder: str | Path | None = None, **sections: Any
) -> Path:
    """Train from the beginning and return the run folder, with its report in it. ``recipe``, ``overrides`` and
    ``sections`` are those of ``read``; ``folder`` must be new, by default it is one under ``runs/``."""
    value = recipe if isinstance(recipe, Recipe) else read(recipe, *overrides, **sections)
    if folder is not None:
        check_free(Path(folder))

    from whet import run

    name = "run" if isinstance(recipe, Recipe) else Path(recipe).stem
    chosen = run.new_folder(name=name) if folder is None else Path(folder)
    return finished(lambda: run.start(value, chosen))


def resume(folder: str | Path, *overrides: str) -> Path:
    """Go on with a run from its newest complete checkpoint and return its folder."""
    from whet import run

    return finished(lambda: run.resume(Path(folder), overrides))


def finished(train: Callable[[], Path]) -> Path:
    """Train, write the report of the run folder, and print what the run amounts to."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        folder = train()
    else:  # a notebook has a loop of its own
        with ThreadPoolExecutor(1) as thread:
            folder = thread.submit(train).result()

    from whet.metrics.sinks.jsonl import FILE

    if (folder / FILE).exists():  # no report without the sink that it is made from
        from whet.show.report import write_report
        from whet.show.summary import print_summary

        write_report(folder)
        print_summary(folder)
    return folder
