"""Checks of the inputs of a pipeline's jobs before a job runs: outputs of the wrong kind, rows of the wrong form,
missing models, adapters and files."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from whet.base.errors import WhetError
from whet.config import Config, ConfigIssue, Loaded, RecipeError
from whet.config.base import within
from whet.data.files import data_files
from whet.data.row_kinds import Conversation, Example, Preference, Scored
from whet.data.rows import FileRows
from whet.fetch.model import check_model
from whet.models.config import ModelConfig
from whet.pipeline.config import Eval, Export, PipelineConfig, RowsOfAnswers, Train
from whet.pipeline.job import Job, Reference, kind_of
from whet.prep.config import PrepConfig
from whet.tasks.base import TaskSet
from whet.tasks.prompts import Prompts

_FORMS: dict[str, type[Example]] = {"pairs": Preference, "texts": Conversation, "scored": Scored}
_CALLED = {"model": "a model", "reward model": "a reward model", "rows": "rows", "rollouts": "rollouts"}


class Issues:
    """The mistakes in a pipeline, with their places in its file."""

    def __init__(self, loaded: Loaded[PipelineConfig]) -> None:
        self.tree = loaded.tree
        self.found: list[ConfigIssue] = []

    def add(self, name: str, key: str, message: str) -> None:
        """Add a mistake in ``key`` of the stage ``name``."""
        path = ("stages", name, *key.split("."))
        self.found.append(ConfigIssue(".".join(path), self.tree.find(path)[0].where, message))

    def check(self) -> None:
        """Raise ``RecipeError`` if there are mistakes."""
        if self.found:
            raise RecipeError(self.found)


class Checks:
    """The checks of the jobs of a pipeline in ``folder`` with these ``stages``."""

    def __init__(self, jobs: Mapping[str, Job], stages: Collection[str], folder: Path, issues: Issues) -> None:
        self.jobs, self.stages, self.folder, self.issues = jobs, stages, folder, issues

    def check(self, job: Job) -> None:
        """Check the inputs of a job."""
        for key, each in job.inputs.items():
            if isinstance(each, Reference):
                self._check_kind(job, key, each)
            else:
                self._check_there(job, key, each)
        if isinstance(job.stage, Eval) and job.stage.against and not isinstance(job.data, TaskSet):
            self.issues.add(job.name, "against", "this recipe learns from rows, and only tasks compare two models")
        for part in within(job.value):
            if not self._names_an_output(part):
                given = (key for key, each in job.inputs.items() if isinstance(part, ModelConfig) and each == part.path)
                self._check_available(job, next(given, "recipe"), part.check_available)

    def _names_an_output(self, part: Config) -> bool:
        """Return whether settings name a path in the pipeline's folder, where a stage may write it later."""
        values = [
            each for value in dict(part).values() for each in (value.values() if isinstance(value, dict) else [value])
        ]
        return any(isinstance(value, str) and value.startswith(f"{self.folder}/") for value in values)

    def _check_available(self, job: Job, key: str, check: Callable[[], None]) -> None:
        try:
            check()
        except WhetError as error:
            self.issues.add(job.name, key, str(error))

    def _check_kind(self, job: Job, key: str, reference: Reference) -> None:
        source = self.jobs[reference.stage]
        takes, kind = job.stage.takes[key.partition(".")[0]], kind_of(source, reference.output, self.jobs)
        if isinstance(job.stage, Export) and not isinstance(source.stage, Train):
            if job.name in self.stages:
                self.issues.add(
                    job.name, key, f"export takes a checkpoint of a train stage, and {reference} is a model"
                )
        elif kind not in takes:
            written = job.stage.given()[key]
            self.issues.add(
                job.name, key, f"{written} is {_CALLED[kind]}; expected {' or '.join(_CALLED[each] for each in takes)}"
            )
        elif kind == "rows":
            self._check_rows(job, key, reference, source)

    def _check_rows(self, job: Job, key: str, reference: Reference, source: Job) -> None:
        if isinstance(source.value, PrepConfig):
            if reference.output != "train" and not source.value.value_of(reference.output):
                message = f"stage {source.name!r} has {reference.output} = 0, so it writes no {reference.output} rows"
                self.issues.add(job.name, key, message)
            kind = next(iter(source.value.sources.values())).rows.kind
        else:
            assert isinstance(source.stage, RowsOfAnswers)
            kind = _FORMS[source.stage.form]
        data = job.data
        if isinstance(data, FileRows):
            fits, read = kind.fields == data.kind.fields, ", ".join(data.kind.fields)
        else:  # a row of messages is a prompt as well
            fits, read = not isinstance(data, Prompts) or kind.fields[0] in ("prompt", "messages"), "prompt or messages"
        if not fits:
            fields = ", ".join(kind.fields)
            self.issues.add(job.name, key, f"{reference} holds rows of {fields}; the recipe reads {read}")

    def _check_there(self, job: Job, key: str, text: str) -> None:
        """Complain if a file or folder that an input names doesn't exist. Models of recipes are checked elsewhere."""
        if key in ("data", "test_data") and not text.startswith(("hf:", "http://", "https://")):
            try:
                missing = [file for file in data_files(text) if not file.exists()]
            except WhetError as error:
                self.issues.add(job.name, key, str(error))
                return
            if missing:
                self.issues.add(job.name, key, f"{missing[0]} does not exist")
        runs = key == "rollouts" or isinstance(job.stage, Export)
        if runs and not (Path(text) / "recipe.yaml").is_file():
            self.issues.add(job.name, key, f"{text!r} is neither an output of a stage nor a run folder")
        if key == "reward_model" and "/" not in text and not Path(text).is_dir():
            self.issues.add(job.name, key, f"the folder {text!r} does not exist")
        if key == "against":
            self._check_available(job, key, partial(check_model, text))
