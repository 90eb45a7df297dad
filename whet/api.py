"""whet from Python: what ``whet train`` and ``whet resume`` do, for scripts and notebooks.

import whet

folder = whet.start("quickstart", "steps=5", data=MyTasks())
"""

import asyncio
import json
import shutil
import tempfile
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
    from collections.abc import Iterable, Mapping

    from whet.run.open import Opening
    from whet.run.result import Result


def read(recipe: str | Path = "quickstart", *overrides: str, **sections: Any) -> Recipe:
    """Return a recipe by name or path, with ``overrides`` as on the command line (``"optimizer.lr=1e-6"``) and whole
    ``sections`` as values (``data=MyTasks()``, ``steps=5``). Raise ``RecipeError`` naming all that is wrong."""
    loaded = load(Recipe, recipe, overrides)
    try:
        inherited = {key: part for key, part in loaded.value if key not in Recipe.replaced_by(sections)}
        value = Recipe.model_validate({**inherited, **sections})
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
) -> "Result":
    """Train from the beginning and return the run, with its report. ``recipe``, ``overrides`` and
    ``sections`` are those of ``read``; ``folder`` must be new, by default it is one under ``runs/``."""
    _check_importing()
    value = recipe if isinstance(recipe, Recipe) else read(recipe, *overrides, **sections)
    check_models(value)
    if folder is not None:
        check_free(Path(folder))

    name = "run" if isinstance(recipe, Recipe) else Path(recipe).stem
    chosen = new_folder(name=name) if folder is None else Path(folder)

    def train(stop: StopRequest) -> Path:
        from whet.run import run  # takes seconds

        return run.start(value, chosen, stop)

    return _told(f"{name}, {value.duration}, into {chosen}", chosen, train)


def open(
    recipe: str | Path | Recipe = "quickstart", *overrides: str, folder: str | Path | None = None, **sections: Any
) -> "Opening":
    """Open a run whose loop is yours; the arguments are the same as for ``start``. Nothing is trained by itself.

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


def train(
    *overrides: str,
    model: str,
    data: "Iterable[Mapping[str, Any]] | str | Path",
    reward: Callable[..., Any],
    test: "Iterable[Mapping[str, Any]] | str | Path | None" = None,
    steps: int = 20,
    folder: str | Path | None = None,
    **settings: Any,
) -> "Result":
    """Train a model by reinforcement learning (GRPO) on rows of your own, rewarded by a function of your own.

    whet.train(model="smollm2-135m-instruct", data=[{"prompt": "What is 2 + 2?", "answer": "4"}, ...],
               reward=lambda text, answer: answer in text)

    ``model``: a folder, a Hub id or a built-in name. ``data``: rows with a ``prompt`` (a text or messages) and columns
    for the reward: a list of dicts, a ``datasets.Dataset``, a DataFrame, or the path of a JSONL file. ``reward``: a
    function, sync or async, of the model's text and, by their names, columns of the row; it returns a number, a bool
    or a dict of scores with the key ``reward``. ``test``: rows to evaluate on; by default up to 100, and at most a
    tenth, of ``data`` are held out. ``settings``: ``lr``, ``group_size``, ``max_new_tokens``, ``prompts_per_step``,
    ``seed``, or whole sections as in ``start``; ``overrides`` are written as on the command line.

    Raises ``DataError`` naming the row that has no prompt, ``RecipeError`` naming all settings that are wrong."""
    from whet.tasks.functions import name_of, write_rows

    _check_importing()
    chosen = new_folder(name="train") if folder is None else Path(folder)
    check_free(chosen)
    name, found = name_of(reward)
    if not found:
        print(
            f"note: {name} stands in a notebook or inside of a function, where `whet resume` can't find it", flush=True
        )
    tasks: dict[str, Any] = {"type": "function", "reward": name}
    with tempfile.TemporaryDirectory(prefix="whet-") as scratch:
        for key, rows, file in (("path", data, "rows.jsonl"), ("test_path", test, "test.jsonl")):
            if isinstance(rows, str | Path):
                tasks[key] = str(rows)
            elif rows is not None:
                count = write_rows(Path(scratch) / file, rows)
                tasks[key] = str((chosen / file).absolute())
                if key == "path" and test is None:
                    tasks["test_size"] = min(100, count // 10)
        written = {
            "steps": steps,
            "model": {"path": model},
            "data": tasks,
            "algorithm": "grpo",
            "optimizer": {"lr": 1e-5},
        }
        if tasks.get("test_size") == 0:
            written["evaluation"] = {"enabled": False}
        base = Path(scratch) / "train.yaml"
        base.write_text(json.dumps(written), encoding="utf-8")  # JSON is YAML
        short = [f"{_SHORT[key]}={settings.pop(key)}" for key in list(settings) if key in _SHORT]
        value = read(base, *short, *overrides, **settings)
        for file in ("rows.jsonl", "test.jsonl"):
            if (Path(scratch) / file).exists():
                chosen.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(scratch) / file, chosen / file)
    return start(value, folder=chosen)


def _check_importing() -> None:
    if importing():
        raise ConfigError("this file starts a run while it is imported; put that under: if __name__ == '__main__':")


_SHORT = {
    "lr": "optimizer.lr",
    "group_size": "algorithm.group_size",
    "max_new_tokens": "sampling.max_new_tokens",
    "prompts_per_step": "rollouts.prompts_per_step",
    "seed": "seed",
}


def resume(folder: str | Path, *overrides: str) -> "Result":
    """Resume a run from its newest complete checkpoint and return it."""

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


def _told(title: str, folder: Path, train: Callable[[StopRequest], Path]) -> "Result":
    """Train; what goes wrong is raised without the lines of whet, and with how to go on."""
    from whet.run.result import Result

    try:
        return Result(finished(title, folder, train))
    except KeyboardInterrupt:
        saved = (folder / "checkpoints").is_dir()
        hint = f"Resume with: whet.resume({str(folder)!r})" if saved else f"Nothing is saved in {folder} yet"
        print(f"interrupted. {hint}", flush=True)
        raise KeyboardInterrupt(hint) from None
    except WhetError as error:
        raise error.with_traceback(None) from None
