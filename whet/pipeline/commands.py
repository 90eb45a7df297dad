"""The command that a stage runs: one of ``whet`` where there is one, so that it can be repeated by hand."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from whet.pipeline.config import Eval, Export, Prep, RandomModel, RowsOfAnswers
from whet.pipeline.job import Job, Reference

RESULT = "result.json"
_MAKE = "whet.pipeline.make"


@dataclass(frozen=True, slots=True)
class Command:
    """A module to run, its words, and the file that receives its standard output, if any."""

    words: tuple[str, ...]
    module: str = "whet"
    output: Path | None = None

    def __str__(self) -> str:
        program = ("whet",) if self.module == "whet" else ("python", "-m", self.module)
        return shlex.join((*program, *self.words)) + (f" > {shlex.quote(str(self.output))}" if self.output else "")


def command_of(job: Job, folder: Path, *, resume: bool = False) -> Command:
    """Return the command of a job. ``resume``: its folder holds a run that was begun with the same settings."""
    place, recipe, paths = str(folder / job.name), str(recipe_file(job, folder)), job.paths
    match job.stage:
        case Prep(sample=sample):
            few = () if sample is None else ("--sample", str(sample))
            return Command(("prep", recipe, "--out", place, "--force", *few))
        case RowsOfAnswers(form=form) as stage:
            return Command(("rows", paths["rollouts"], stage.path(folder / job.name, "rows"), form), _MAKE)
        case Eval():
            against = ("--against", paths["against"]) if "against" in paths else ()
            return Command(("eval", recipe, *against, "--json"), output=folder / job.name / RESULT)
        case Export(adapter=adapter, dtype=dtype):
            source = job.inputs["model"]
            words = ["export", paths["model"], "--out", place, "--force"]
            words += ["--step", "latest"] * (isinstance(source, Reference) and source.output == "last")
            words += ["--adapter"] * adapter + ([] if dtype is None else ["--dtype", dtype])
            return Command(tuple(words))
        case RandomModel(seed=seed, images=images):
            return Command(("random_vision_model" if images else "random_model", place, str(seed)), _MAKE)
    return Command(("resume", place)) if resume else Command(("train", recipe, "--folder", place))


def recipe_file(job: Job, folder: Path) -> Path:
    """Return the file in which the recipe of a stage is written, with all its settings."""
    return folder / f"{job.name}.yaml"
