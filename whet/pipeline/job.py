"""The jobs of a pipeline: stages with everything that is needed to run them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whet.base.strict_json import JsonObject
from whet.data.base import Data
from whet.pipeline.config import STAGES, Export, Kind, Stage, Train
from whet.prep.config import PrepConfig
from whet.run.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Reference:
    """An output of a stage, as in ``sft.best``."""

    stage: str
    output: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.output}"


@dataclass(slots=True)
class Job:
    """A stage with everything that is needed to run it."""

    name: str
    stage: Stage
    inputs: dict[str, Reference | str]  # by name; a text is a path or the name of a model
    value: Recipe | PrepConfig | None = None
    settings: JsonObject = field(default_factory=dict)  # dotted key -> value, of all that is not a default
    paths: dict[str, str] = field(default_factory=dict)  # of the inputs, as a recipe or command names them

    @property
    def needs(self) -> list[str]:
        """The jobs whose outputs it reads."""
        return list(dict.fromkeys(each.stage for each in self.inputs.values() if isinstance(each, Reference)))

    @property
    def type(self) -> str:
        """The ``type`` of the stage in the file."""
        return next(name for name, path in STAGES.items() if path.endswith(f":{type(self.stage).__name__}"))

    @property
    def data(self) -> Data | None:
        """The rows or tasks that the recipe of the stage learns from."""
        return self.value.data if isinstance(self.value, Recipe) else None


def kind_of(source: Job, output: str, jobs: Mapping[str, Job]) -> Kind:
    """Return the kind of an output: of a checkpoint, by the algorithm that trained it."""
    if isinstance(source.stage, Export) and isinstance(origin := source.inputs["model"], Reference):
        return kind_of(jobs[origin.stage], origin.output, jobs)
    if isinstance(source.stage, Train) and output != "rollouts" and isinstance(source.value, Recipe):
        return "reward model" if source.value.algorithm.main_role == "reward_model" else "model"
    return source.stage.outputs[output]
