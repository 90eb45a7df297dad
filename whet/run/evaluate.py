"""Evaluation of a model: episodes over held-out tasks, graded as in training, without learning."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from whet.base.closing import Closing
from whet.base.errors import DataError, DeadlineError
from whet.base.progress import PROGRESS
from whet.base.seeds import derive_seed
from whet.chat.renderer import Renderer, check_images
from whet.config import Component, Config
from whet.core.types import Episode, Status, Task
from whet.engines.base import Engine
from whet.metrics.clock import Timing
from whet.processes.compute import run_computing
from whet.rollouts.blend import Blend, Name
from whet.rollouts.episode import play
from whet.rollouts.failures import Failures
from whet.rollouts.sampling import Sampling, Temperature
from whet.rollouts.session import Recording
from whet.run.scores import Report, Stated
from whet.tasks.base import TASK_SETS, TaskSet
from whet.tasks.isolated import IsolatedEnvironments

if TYPE_CHECKING:
    from whet.endpoint.server import Endpoint
    from whet.run.recipe import Recipe

log = logging.getLogger(__name__)

_CHANGED = ("samples", "temperature", "max_new_tokens")  # settings in which an additional set may differ


class HeldOut(Config):
    """The settings of every evaluation, on tasks or rows that the run doesn't train on."""

    enabled: bool = True
    """False: never."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    split: Literal["test", "train"] = "test"
    """The split of the tasks or rows."""
    limit: int | None = Field(None, gt=0)
    """At most this many, the first of the split."""
    patience: int = Field(0, ge=0)
    """End the run after this many evaluations in a row that are not better in ``checkpoints.best_metric``; each better
    one is saved. 0: never."""

    @model_validator(mode="after")
    def _has_evaluations(self) -> Self:
        if self.patience and not (self.enabled and self.every):
            raise ValueError("patience counts evaluations during the run: set evaluation.every")
        return self


class EvaluationSet(Config):
    """An additional set of tasks that every evaluation answers. A setting that is None is as for the run's tasks."""

    data: Annotated[TaskSet, Component(TASK_SETS)]
    """The tasks; the run never trains on them."""
    split: Literal["test", "train"] = "test"
    """The split of its tasks."""
    limit: int | None = Field(None, gt=0)
    """At most this many, the first of the split."""
    samples: int | None = Field(None, gt=0, le=100_000)
    """Answers per task."""
    temperature: Temperature | None = None
    """0: greedy."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Longest answer."""


class EvaluationConfig(HeldOut):
    """The settings of evaluations on tasks. A run that learns from rows reads only the settings in ``HeldOut``."""

    samples: int = Field(1, gt=0, le=100_000)
    """Answers per task."""
    temperature: Temperature = 0.0
    """0: greedy."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Longest answer; by default as in training."""
    consensus: float = Field(0.5, gt=0, le=1)
    """Share of a task's answers that must agree for cons@k, with ``samples`` above 1."""
    concurrency: int = Field(256, gt=0, le=100_000)
    """Episodes that run at once."""
    retries: int = Field(2, ge=0)
    """Repetitions of an episode after its environment or generator failed."""
    deadline: float = Field(3600.0, gt=0)
    """Seconds that one evaluation may take, of each set."""
    sets: dict[Name, EvaluationSet] = Field(default={})
    """Additional sets by name; the name is part of their metrics."""

    def sampling(self, training: Sampling) -> Sampling:
        """Return the sampling of an evaluation: as in training, with this temperature and length, and no truncation."""
        changes: dict[str, Any] = {"temperature": self.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if self.max_new_tokens is not None:
            changes["max_new_tokens"] = self.max_new_tokens
        return training.model_copy(update=changes)


async def evaluate_tasks(
    tasks: Sequence[Task],
    environments: IsolatedEnvironments,
    generator: Engine[object],
    renderer: Renderer,
    sampling: Sampling,
    config: EvaluationConfig,
    *,
    blend: Blend | None = None,
    seed: int = 0,
    endpoint: "Endpoint | None" = None,
    name: str = "",
    stated: Stated | None = None,
    record: type[Recording] = Recording,
) -> Report:
    """Answer every task ``config.samples`` times and grade. An answer is correct when its score ``correct`` is 1 or,
    where the task set has no such score, when its reward is positive. Tasks of a ``blend`` have the limits of their
    environments. Raises ``DataError`` for an episode that fails after all retries, because a missing answer must not
    count as a wrong one."""
    if not tasks:
        raise DataError("the task set has no task to evaluate on; choose another evaluation.split")

    samples, slots, failures = config.samples, asyncio.Semaphore(config.concurrency), Failures(one_ends_all=True)

    async def answer(task: Task, sample: int) -> Episode:
        async with slots:
            episode = await play(
                environments,
                task,
                generator,
                renderer,
                blend.of[task.environment].sampling.under(sampling) if blend else sampling,
                retries=config.retries,
                seed=derive_seed(seed, "evaluation", task.uid, sample),
                session=f"evaluation/{task.uid}/{sample}",
                timing=Timing(),
                failures=failures,
                endpoint=endpoint,
                record=record,
            )
        if episode.status is Status.FAILED:
            failures.check()
            raise DataError(f"the evaluation of {task.uid} failed: {episode.error}")
        answers.done += 1
        return episode

    limit = asyncio.timeout(config.deadline)
    try:
        with PROGRESS.counting(f"answers{name and f' of {name}'}", len(tasks) * samples) as answers:
            async with limit, asyncio.TaskGroup() as group:
                jobs = [group.create_task(answer(task, i)) for task in tasks for i in range(samples)]
    except TimeoutError:
        place = environments.blocked_at()
        hint = "" if place is None else f"; an environment blocks at {place}"
        raise DeadlineError(
            f"the evaluation took longer than evaluation.deadline = {config.deadline:g} s{hint}"
        ) from None
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    if failures.counts:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in failures.counts.items())
        log.warning("attempts at answers failed and were repeated with success: %s", kinds)
    asked = [task for task in tasks for _ in range(samples)]
    episodes = [(task, job.result()) for task, job in zip(asked, jobs, strict=True)]
    report = Report.of(episodes, samples, stated, config.consensus)
    for environment in blend.of if blend else ():
        if played := [(task, episode) for task, episode in episodes if task.environment == environment]:
            report.sets[environment] = Report.of(played, samples, stated, config.consensus)
    return report


async def evaluate_all(
    recipe: "Recipe",
    environments: IsolatedEnvironments,
    generator: Engine[object],
    renderer: Renderer,
    endpoint: "Endpoint",
) -> Report:
    """Evaluate on the run's held-out tasks and on each additional set."""
    config, data = recipe.evaluation, recipe.taskset
    blend = data if isinstance(data, Blend) else None
    tasks, sampling = held_out(data, config.split, config.limit, renderer), config.sampling(recipe.sampling)
    report = await evaluate_tasks(
        tasks,
        environments,
        generator,
        renderer,
        sampling,
        config,
        blend=blend,
        seed=recipe.seed,
        endpoint=endpoint,
        stated=_stated(data),
    )
    report.sets |= await evaluate_sets(recipe, config.sets, generator, renderer, endpoint)
    return report


async def evaluate_sets(
    recipe: "Recipe",
    sets: Mapping[str, EvaluationSet],
    generator: Engine[object],
    renderer: Renderer,
    endpoint: "Endpoint | None",
    record: type[Recording] = Recording,
) -> dict[str, Report]:
    """Evaluate on each set, one after the other."""
    reports = {}
    for name, additional in sets.items():
        changes = {key: value for key in _CHANGED if (value := additional.value_of(key)) is not None}
        settings = recipe.evaluation.model_copy(update=changes)
        async with Closing() as closing:
            hosted = IsolatedEnvironments(additional.data.open())
            closing.closes(f"the environments of {name or 'the tasks'}", hosted.close)
            tasks = held_out(additional.data, additional.split, additional.limit, renderer)
            reports[name] = await evaluate_tasks(
                tasks, hosted, generator, renderer, settings.sampling(recipe.sampling), settings, seed=recipe.seed,
                endpoint=endpoint, name=name, stated=_stated(additional.data), record=record,
            )  # fmt: skip
    return reports


def _stated(taskset: TaskSet) -> Stated | None:
    """Return ``taskset.stated`` if its answers can be equal, so that majorities have a meaning."""
    parts = [part.taskset for part in taskset.of.values()] if isinstance(taskset, Blend) else [taskset]
    return taskset.stated if any(type(part).stated is not TaskSet.stated for part in parts) else None


def held_out(taskset: TaskSet, split: str, limit: int | None, renderer: Renderer) -> list[Task]:
    """Return the first ``limit`` tasks of the split; of a blend, the first ``limit`` tasks of each environment."""
    taken = Counter[str]()
    tasks = []
    for task in taskset.tasks(split):
        check_images(renderer, task.prompt, f" of task {task.uid}")
        taken[task.environment] += 1
        if limit is None or taken[task.environment] <= limit:
            tasks.append(task)
    return tasks


def evaluate(recipe: "Recipe", **options: Any) -> Report:
    """Return ``await evaluate_model(...)``."""
    return run_computing(evaluate_model(recipe, **options))


async def evaluate_model(
    recipe: "Recipe",
    *,
    model: str | None = None,
    run: Path | None = None,
    split: str | None = None,
    limit: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
) -> Report:
    """Evaluate the recipe's model, another ``model`` (name, folder or Hub id), or the best checkpoint of a ``run``.
    Needs a compute thread: see ``run_computing``."""
    from whet.endpoint.server import Endpoint
    from whet.run.build import open_generator

    taskset = recipe.taskset  # raises before a model is loaded
    changes = {"split": split, "limit": limit, "samples": samples, "temperature": temperature}
    config = recipe.evaluation.model_copy(update={k: v for k, v in changes.items() if v is not None})

    settings = recipe.model_copy(update={"evaluation": config})
    async with Closing() as closing:
        environments = IsolatedEnvironments(taskset.open())
        closing.closes("the environments", environments.close)
        generator, renderer = await closing.enter_async_context(open_generator(settings, run, model))
        endpoint = Endpoint(renderer, recipe.endpoint)
        closing.closes("the endpoint", endpoint.close)
        PROGRESS.begin("evaluating")
        return await evaluate_all(settings, environments, generator, renderer, endpoint)


async def evaluate_on(
    recipe: "Recipe",
    sets: Mapping[str, EvaluationSet],
    *,
    model: str | None = None,
    run: Path | None = None,
    address: tuple[str, str, str | None] | None = None,
) -> dict[str, Report]:
    """Evaluate a model on sets of tasks: the recipe's, another ``model``, the best checkpoint of a ``run``, or the one
    at an ``address`` (URL, name, key). Needs a compute thread: see ``run_computing``."""
    from whet.endpoint.server import Endpoint
    from whet.run.build import open_generator
    from whet.run.remote_model import RemoteModel, RemoteRecording

    async with Closing() as closing:
        PROGRESS.begin("evaluating")
        if address is not None:
            remote: Any = RemoteModel(*address)
            closing.closes("the client of the endpoint", remote.close)
            nothing: Any = None  # the endpoint renders
            return await evaluate_sets(recipe, sets, remote, nothing, None, RemoteRecording)
        generator, renderer = await closing.enter_async_context(open_generator(recipe, run, model))
        endpoint = Endpoint(renderer, recipe.endpoint)
        closing.closes("the endpoint", endpoint.close)
        return await evaluate_sets(recipe, sets, generator, renderer, endpoint)
