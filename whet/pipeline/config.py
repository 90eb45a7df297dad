"""A pipeline as a typed value: its stages by name, each with a recipe, settings and inputs, and its profiles. And the
reading of its file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, StringConstraints

from whet.base.lazy import FileDtype
from whet.config import Component, Config, ConfigIssue, Loaded, RecipeError, load
from whet.config.issues import did_you_mean
from whet.config.loading import recipe_names

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
Kind = Literal["model", "reward model", "rows", "rollouts"]
"""The kinds of outputs."""

Takes = Mapping[str, tuple[Kind, ...]]
"""The kinds that an input of each name may refer to."""

STAGES = {
    "prep": "whet.pipeline.config:Prep",
    "train": "whet.pipeline.config:Train",
    "rows": "whet.pipeline.config:RowsOfAnswers",
    "eval": "whet.pipeline.config:Eval",
    "export": "whet.pipeline.config:Export",
    "random_model": "whet.pipeline.config:RandomModel",
}

_ABOUT = ("README.md", "lineage.json")  # files about a model, with dates

SHIPPED = Path(__file__).parent / "shipped"
"""The folder of the pipelines that come with the package."""


class Stage(Config):
    """A step of a pipeline. Its inputs may refer to the output of another stage, as in ``model: sft.best``."""

    takes: ClassVar[Takes] = {}
    """The kinds that each input may refer to."""
    outputs: ClassVar[Mapping[str, Kind]] = {}
    kept: ClassVar[bool] = False
    """A folder that is replaced is kept under ``older/``, because it took long to make."""

    def given(self) -> dict[str, str]:
        """Return the inputs that are set: name, as in ``model`` or ``teachers.tutor``, -> text."""
        inputs = {}
        for name in self.takes:
            value = getattr(self, name)
            if isinstance(value, str):
                inputs[name] = value
            elif value is not None:
                inputs |= {f"{name}.{key}": text for key, text in value.items()}
        return inputs

    def files(self, folder: Path, output: str) -> list[Path]:
        """Return the files of an output; ``""``: of all outputs."""
        return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _ABOUT)

    def path(self, folder: Path, output: str) -> str:
        """Return the path of an output, as a recipe names it."""
        return str(folder)


class FromRecipe(Stage):
    """A stage that a recipe describes."""

    recipe: str
    """A recipe of the package, or the path of a YAML file, relative to the pipeline's."""
    settings: dict[str, JsonValue] = Field(default={})
    """Settings of the recipe to change."""


class Prep(FromRecipe):
    """Data is prepared, as by ``whet prep``; the recipe is the blend."""

    takes: ClassVar[Takes] = {"model": ("model",)}
    outputs: ClassVar[Mapping[str, Kind]] = {"train": "rows", "validation": "rows", "test": "rows"}
    kept: ClassVar[bool] = True

    model: str | None = None
    """The model whose tokenizer and chat template rows must fit."""
    sample: int | None = Field(None, gt=0)
    """Read only the first rows of each source."""

    def files(self, folder: Path, output: str) -> list[Path]:
        return sorted(folder.glob(f"{output or '*'}-*.jsonl"))

    def path(self, folder: Path, output: str) -> str:
        return str(folder / f"{output}-*.jsonl")


class Train(FromRecipe):
    """A model is trained by any algorithm, as by ``whet train``; the stage's folder is the run's."""

    takes: ClassVar[Takes] = {
        "model": ("model",),
        "data": ("rows",),
        "test_data": ("rows",),
        "reward_model": ("reward model",),
        "teachers": ("model",),
    }
    outputs: ClassVar[Mapping[str, Kind]] = {
        "best": "model",
        "last": "model",
        "rollouts": "rollouts",
    }  # or a reward model
    kept: ClassVar[bool] = True

    model: str | None = None
    """The model to start from."""
    data: str | None = None
    """Rows to learn from: ``data.path`` of the recipe."""
    test_data: str | None = None
    """Rows to evaluate on; by default some of ``data``."""
    reward_model: str | None = None
    """The reward model of the task set ``reward_model``."""
    teachers: dict[Name, str] = Field(default={})
    """Teachers of distillation, by their names in the recipe."""

    def files(self, folder: Path, output: str) -> list[Path]:
        checkpoints, rollouts = folder.glob("checkpoints/step-*/manifest.json"), folder.glob("rollouts/*.jsonl")
        return sorted([*checkpoints] * (output != "rollouts") + [*rollouts] * (output in ("rollouts", "")))


class RowsOfAnswers(Stage):
    """The graded answers of a run become rows to learn from."""

    takes: ClassVar[Takes] = {"rollouts": ("rollouts",)}
    outputs: ClassVar[Mapping[str, Kind]] = {"rows": "rows"}

    rollouts: str
    """The answers, as in ``sample.rollouts``, or a run folder."""
    form: Literal["pairs", "texts", "scored"] = "pairs"
    """Right answers over wrong ones to the same task, right answers alone, or all answers with a score of 1 or 0."""

    def path(self, folder: Path, output: str) -> str:
        return str(folder / "rows.jsonl")


class Eval(FromRecipe):
    """A model is measured, as by ``whet eval``, on the tasks or rows of a recipe."""

    takes: ClassVar[Takes] = {"model": ("model",), "against": ("model",), "data": ("rows",), "test_data": ("rows",)}
    kept: ClassVar[bool] = True

    model: str
    """The model to measure."""
    against: str | None = None
    """A second model on the same tasks, for the difference with its interval."""
    data: str | None = None
    """Rows: ``data.path`` of the recipe."""
    test_data: str | None = None
    """Rows to evaluate on: ``data.test_path`` of the recipe."""


class Export(Stage):
    """A checkpoint becomes a folder that transformers loads, as by ``whet export``."""

    takes: ClassVar[Takes] = {"model": ("model", "reward model")}
    outputs: ClassVar[Mapping[str, Kind]] = {"model": "model"}  # or a reward model

    model: str
    """A checkpoint, as in ``rl.best``."""
    adapter: bool = False
    """Write only the LoRA adapter, not merged."""
    dtype: FileDtype | None = None
    """Precision of the weights, instead of the base model's."""


class RandomModel(Stage):
    """A tiny model of random weights that reads bytes: to try a pipeline in minutes."""

    outputs: ClassVar[Mapping[str, Kind]] = {"model": "model"}

    seed: int = Field(0, ge=0)
    """All weights are derived from it."""
    images: bool = False
    """The model also reads images, with ``model.vision``."""


class PipelineConfig(Config):
    """A pipeline: ``whet pipeline FILE`` reads it."""

    description: str = ""
    """One line about the pipeline."""
    stages: dict[Name, Annotated[Stage, Component(STAGES)]] = Field(min_length=1)
    """The stages by name; their order is derived from their references."""
    profiles: dict[Name, dict[str, JsonValue]] = Field(default={})
    """Changes of the file by name, of which ``--profile`` chooses one."""


def load_pipeline(source: str, overrides: Sequence[str] = (), profile: str | None = None) -> Loaded[PipelineConfig]:
    """Read a pipeline by its path, or by its name one of the package. Raises ``RecipeError`` naming all mistakes."""
    names = recipe_names(SHIPPED)
    if source not in names and not source.endswith((".yaml", ".yml")):
        message = f"no pipeline has this name.{did_you_mean(source, names)} The package has: {', '.join(names)}"
        raise RecipeError([ConfigIssue("", repr(source), f"{message}. The path of a file ends in .yaml.")])
    return load(PipelineConfig, source, overrides, SHIPPED, profile=profile)
