"""The stages of a pipeline in the order of their references, each with its recipe. Everything that can be found wrong
before a stage runs is reported together, with its file and line: unknown references, cycles, settings that a recipe
doesn't have, and what ``checks.py`` finds."""

import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from whet.base.strict_json import JsonObject
from whet.config import Config, ConfigIssue, Loaded, RecipeError, load
from whet.config.issues import did_you_mean
from whet.config.loading import find_recipe
from whet.config.schema import UNTYPED, merge
from whet.config.tree import DEFAULT, Node, from_plain
from whet.pipeline.checks import Checks, Issues
from whet.pipeline.config import (
    Eval,
    Export,
    FromRecipe,
    PipelineConfig,
    Prep,
    Stage,
)
from whet.pipeline.job import Job, Reference
from whet.pipeline.plan import OLDER
from whet.prep.config import PrepConfig
from whet.run.recipe import Recipe

_TARGETS = {"model": "model.path", "data": "data.path", "test_data": "data.test_path", "reward_model": "data.model"}
_OUTPUTS = {"best", "last", "rollouts", "train", "validation", "test", "rows", "model"}


def build(loaded: Loaded[PipelineConfig], folder: Path) -> dict[str, Job]:
    """Return the jobs in an order in which each comes after the jobs that it needs. The checkpoint of a stage that
    another one starts from is exported by a job with the name of the reference, as in ``sft.best``. ``folder``: an
    absolute path. Raises ``RecipeError`` with all mistakes."""
    return _Builder(loaded, folder).build()


class _Builder:
    def __init__(self, loaded: Loaded[PipelineConfig], folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.stages: dict[str, Stage] = dict(loaded.value.stages)
        self.issues = Issues(loaded)

    def build(self) -> dict[str, Job]:
        jobs = {name: Job(name, stage, self._inputs(name, stage)) for name, stage in self.stages.items()}
        if OLDER in self.stages:
            self.issues.add(OLDER, "type", f"{OLDER} is the folder of earlier runs of stages; choose another name")
        self.issues.check()
        exports = {str(ref): ref for job in jobs.values() for ref in self._checkpoints(job)}
        jobs |= {name: Job(name, Export(model=name), {"model": ref}) for name, ref in exports.items()}
        for job in jobs.values():
            for key, ref in job.inputs.items():
                if not isinstance(job.stage, Export) and str(ref) in exports:
                    job.inputs[key] = Reference(str(ref), "model")
        order = self._order(jobs)
        for name in order:
            self._load(jobs[name])
        self.issues.check()
        checks = Checks(jobs, self.stages, self.folder, self.issues)
        for name in order:
            checks.check(jobs[name])
        self.issues.check()
        return {name: jobs[name] for name in order}

    # References

    def _inputs(self, name: str, stage: Stage) -> dict[str, Reference | str]:
        inputs: dict[str, Reference | str] = {}
        for key, text in stage.given().items():
            inputs[key] = text
            try:
                if (reference := self._reference(text)) is not None:
                    inputs[key] = reference
            except ValueError as error:
                self.issues.add(name, key, str(error))
        return inputs

    def _reference(self, text: str) -> Reference | None:
        """Return the reference that a text is, if any. Raises ``ValueError`` for one to nothing."""
        if text in self.stages:
            names = ", ".join(f"{text}.{output}" for output in self.stages[text].outputs)
            raise ValueError(f"{text!r} is a stage; name one of its outputs: {names or 'it has none'}")
        name, _, output = text.rpartition(".")
        if name in self.stages:
            outputs = self.stages[name].outputs
            if output not in outputs:
                raise ValueError(f"stage {name!r} has no output {output!r}.{did_you_mean(output, outputs)} "
                                 f"Its outputs: {', '.join(outputs) or 'none'}")  # fmt: skip
            return Reference(name, output)
        if output in _OUTPUTS and re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"no stage is called {name!r}.{did_you_mean(name, self.stages)} "
                             f"Stages: {', '.join(self.stages)}")  # fmt: skip
        return None

    def _checkpoints(self, job: Job) -> Iterable[Reference]:
        """Yield the references to checkpoints, which the job can read only as exported models."""
        for each in job.inputs.values():
            if isinstance(each, Reference) and each.output in ("best", "last") and not isinstance(job.stage, Export):
                yield each

    def _order(self, jobs: Mapping[str, Job]) -> list[str]:
        try:
            return list(TopologicalSorter({name: job.needs for name, job in jobs.items()}).static_order())
        except CycleError as error:
            cycle = [name for name in reversed(error.args[1]) if name in self.stages]
            shown = " needs ".join(cycle)
            first = cycle[0]
            key = next(key for key, ref in jobs[first].inputs.items() if str(ref).startswith(f"{cycle[1]}."))
            self.issues.add(first, key, f"the stages form a cycle: {shown}")
            raise RecipeError(self.issues.found) from None

    # Recipes

    def path(self, reference: Reference | str) -> str:
        """Return the path or name by which a recipe names an input."""
        if isinstance(reference, str):
            return reference
        stage = self.stages.get(reference.stage) or Export(model=reference.stage)
        return stage.path(self.folder / reference.stage, reference.output)

    def _load(self, job: Job) -> None:
        options = job.stage.model_dump(
            mode="json", exclude={"recipe", "settings", *job.stage.takes}, exclude_defaults=True
        )
        job.paths = {key: self.path(each) for key, each in job.inputs.items()}
        job.settings = options | {key: self._portable(path) for key, path in job.paths.items()}
        if not isinstance(job.stage, FromRecipe):
            return
        root: type[Config] = PrepConfig if isinstance(job.stage, Prep) else Recipe
        changes = {self._target(key): path for key, path in job.paths.items()}
        changes.pop("", None)
        more: JsonObject = {"model.revision": None} if "model" in job.inputs else {}
        if isinstance(job.stage, Eval):
            more["model.lora"] = None  # an exported model has its adapters merged
        try:
            result = self._load_with(job, root, changes | more)
            if result and "data" in job.inputs and "test_data" not in job.inputs and self._of_recipe(result, job):
                result = self._load_with(job, root, changes | more | {"data.test_path": None})
        except RecipeError as error:
            self.issues.found += [self._in_pipeline(job, issue) for issue in error.issues]
            return
        if result is None:
            return
        assert isinstance(result.value, Recipe | PrepConfig)
        job.value, dump = result.value, from_plain(result.value.model_dump(mode="json"))
        for path in dump.leaves():
            key = ".".join(path)
            if result.origins[key] != DEFAULT and key != "description":
                job.settings[key] = self._portable(dump.find(path)[0].plain())

    def _load_with(self, job: Job, root: type[Config], changes: Mapping[str, object]) -> "Loaded[Any] | None":
        """Load the recipe of a stage with its settings and ``changes``: dotted key -> value."""
        assert isinstance(job.stage, FromRecipe)
        around = self.loaded.tree.find(("stages", job.name))[0]
        settings = around.children().get("settings", Node({}, DEFAULT))
        layer = Node(settings.children(), around.where if settings.where == DEFAULT else settings.where)
        for key, value in changes.items():
            written = next((each for each in job.inputs if self._target(each) == key), "model")
            node = from_plain(value, self.loaded.tree.find(("stages", job.name, *written.split(".")))[0].where)
            for part in reversed(key.split(".")):
                node = Node({part: node}, node.where)
            layer = Node(merge(UNTYPED, layer, node, self.issues.found).value, layer.where)
        recipe = job.stage.recipe
        try:
            near = self.loaded.path.parent / recipe
            source = near if recipe.endswith((".yaml", ".yml")) or "/" in recipe else recipe
            find_recipe(source)
        except RecipeError as error:
            for issue in error.issues:
                self.issues.add(job.name, "recipe", f"{issue.where}: {issue.message}")
            return None
        return load(root, source, settings=layer)

    @staticmethod
    def _target(key: str) -> str:
        """Return the setting of a recipe that an input sets; empty if it sets none."""
        return f"algorithm.{key}.path" if key.startswith("teachers.") else _TARGETS.get(key, "")

    @staticmethod
    def _of_recipe(result: "Loaded[Any]", job: Job) -> bool:
        """Return whether the recipe sets test rows, which don't belong to the rows of the stage."""
        written = job.stage.settings.get("data") if isinstance(job.stage, FromRecipe) else None
        in_stage = isinstance(written, dict) and "test_path" in written
        return getattr(getattr(result.value, "data", None), "test_path", None) is not None and not in_stage

    def _in_pipeline(self, job: Job, issue: ConfigIssue) -> ConfigIssue:
        """Return a problem of a stage's recipe as one of the pipeline."""
        inputs = {target: key for key in job.inputs if (target := self._target(key))}
        key = inputs.get(issue.key, f"settings.{issue.key}" if issue.key else "settings")
        where = issue.where
        if where == DEFAULT:
            where = self.loaded.tree.find(("stages", job.name, "recipe"))[0].where
        return ConfigIssue(f"stages.{job.name}.{key}", where, issue.message)

    def _portable(self, value: object) -> object:
        """Return a setting without the folder of the pipeline, which may be moved."""
        return value.replace(f"{self.folder}/", "./") if isinstance(value, str) else value
