"""The command line over the small recipe of the tests: ``python -m tests.cli.stand_in train r.yaml``.

``whet.run.run`` is replaced by one whose run does what ``name`` says: finish, crash, be interrupted.
"""

import atexit
import sys
import time
import types
from pathlib import Path

from tests.config.settings import Settings
from whet.base.errors import WhetError
from whet.base.files import replacing
from whet.config import Config


class Learner(Config):
    precision: str = "auto"


class Generator(Config):
    dtype: str = "auto"


class WithSteps(Settings):
    """Further sections of a recipe."""

    steps: int = 3
    duration: str = "3 steps"
    learner: Learner = Learner()
    generator: Generator = Generator()


def start(recipe: WithSteps, folder: Path, stop: object = None) -> Path:
    folder.mkdir(parents=True)
    if recipe.name == "crash":
        raise RuntimeError("the disk is on fire")
    if recipe.name == "refuse":
        raise WhetError("no such model: give model=...")
    if recipe.name == "interrupt early":
        raise KeyboardInterrupt
    (folder / "recipe.yaml").touch()
    if recipe.name == "interrupt":
        raise KeyboardInterrupt
    if recipe.name == "wait":  # and be slow to stop, and to exit
        atexit.register(time.sleep, 0.5)
        with replacing(folder / "model") as staging:
            staging.mkdir()
            print("waiting", flush=True)
            try:
                time.sleep(600)
            finally:
                time.sleep(0.3)
    return folder


def prepare() -> None:
    """Put the stand-ins in the place of the recipe and of the run."""
    recipe = types.ModuleType("whet.run.recipe")
    recipe.Recipe = WithSteps  # type: ignore[attr-defined]
    sys.modules["whet.run.recipe"] = recipe
    run = types.ModuleType("whet.run.run")
    run.start = start  # type: ignore[attr-defined]
    sys.modules["whet.run.run"] = run
    import whet
    import whet.run.folder

    whet.run.folder.new_folder = lambda *_, **__: Path("runs/one")
    whet.run.run = run  # type: ignore[attr-defined]


def play() -> None:
    """Run the command line, and check that it has imported nothing heavy."""
    from whet.cli import main

    try:
        main()
    finally:
        heavy = {"torch", "transformers", "datasets", "peft", "reasoning_gym", "wandb"} & sys.modules.keys()
        assert not heavy, heavy


if __name__ == "__main__":
    prepare()
    play()
