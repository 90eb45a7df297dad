"""Evaluation of a model: episodes over held-out tasks, graded as in training, without learning."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from whet.base.closing import Closing
from whet.base.errors import DataError, DeadlineError, naming
from whet.base.progress import PROGRESS
from whet.base.seeds import derive_seed
from whet.chat.renderer import Renderer, check_images
from whet.core.types import Episode, Status, Task
from whet.endpoint.judge_model import JudgeModel
from whet.metrics.clock import Timing
from whet.rollouts.blend import Blend
from whet.rollouts.episode import play
from whet.rollouts.failures import Failures
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import NO_CAST, Cast, Player, Recording
from whet.run.evaluation import EvaluationConfig, EvaluationSet
from whet.run.policies import cast_of
from whet.run.scores import Report, Stated
from whet.tasks.base import TaskSet
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.listing import tasks_of

if TYPE_CHECKING:
    from whet.endpoint.server import Endpoint
    from whet.run.recipe import Recipe

log = logging.getLogger(__name__)

_ASKED = 16  # tasks of which one should offer tools, if any of their set does


async def evaluate_tasks(
    tasks: Sequence[Task],
    data: TaskSet,
    environments: IsolatedEnvironments,
    player: Player,
    sampling: Sampling,
    config: EvaluationConfig,
    *,
    seed: int = 0,
    endpoint: "Endpoint | None" = None,
    name: str = "",
    record: type[Recording] = Recording,
    cast: Cast = NO_CAST,
) -> Report:
    """Have a player answer some tasks of ``data``, each ``config.samples`` times, and grade the answers. An answer is
    correct when its score ``correct`` is 1 or, where the task set has no such score, when its reward is positive. Tasks
    of a blend have the limits of their environments. ``cast`` has the players of roles. Raises ``DataError`` for an
    episode that fails after all retries, because a missing answer must not count as a wrong one."""
    if not tasks:
        raise DataError(
            f"the task set has no task in the split {config.split} to evaluate on; choose another evaluation.split, or "
            "give other tasks as evaluation.sets"
        )

    blend = data if isinstance(data, Blend) else None
    samples, slots, failures = config.samples, asyncio.Semaphore(config.concurrency), Failures(one_ends_all=True)

    async def answer(task: Task, sample: int) -> Episode:
        async with slots:
            episode = await play(
                environments,
                task,
                player.generator,
                player.renderer,
                blend.of[task.environment].sampling.under(sampling) if blend else sampling,
                retries=config.retries,
                seed=derive_seed(seed, "evaluation", task.uid, sample),
                session=f"evaluation/{task.uid}/{sample}",
                timing=Timing(),
                failures=failures,
                endpoint=endpoint,
                record=record,
                cast=cast,
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
    report = Report.of(episodes, samples, _stated(data), config.consensus)
    if blend is not None:
        for environment, part in blend.of.items():
            stated = blend.stated if part.taskset.states_answers else None
            if played := [(task, episode) for task, episode in episodes if task.environment == environment]:
                report.sets[environment] = Report.of(played, samples, stated, config.consensus)
    return report


async def evaluate_recipe(
    recipe: "Recipe",
    environments: IsolatedEnvironments,
    main: Player,
    endpoint: "Endpoint",
    further: Mapping[str, Player] = MappingProxyType({}),
) -> Report:
    """Evaluate on a recipe's held-out tasks, unless there are additional sets and no such task, and on each additional
    set, which ``check_sets`` has checked.

    The ``main`` policy answers. Of ``further`` policies, each plays its roles where episodes have roles; episodes
    without are played by each of them as well, and reported as a set under its name."""
    config, data, cast = recipe.evaluation, recipe.taskset, cast_of(recipe, main, further)
    tasks = held_out(data, config.split, config.limit, main.renderer)

    async def played_by(player: Player, name: str = "") -> Report:
        return await evaluate_tasks(
            tasks, data, environments, player, config.sampling(recipe.sampling), config,
            seed=recipe.seed, endpoint=endpoint, name=name, cast=cast,
        )  # fmt: skip

    report = Report.without_tasks()
    if tasks or not config.sets:
        report = await played_by(main)
        if any(branch.role not in cast for _, episode in report.episodes for branch in episode.branches):
            report.sets |= {name: await played_by(player, name) for name, player in further.items()}
    with telling_finished({"": report} if report.n else {}):
        report.sets |= await evaluate_sets(recipe, config.sets, main, endpoint)
    return report


@contextmanager
def telling_finished(reports: Mapping[str, Report]) -> Iterator[None]:
    """Log the accuracy of the reports if the block fails or is interrupted: their answers may have taken hours."""
    try:
        yield
    except BaseException:
        for name, report in reports.items():
            log.warning(
                "finished before the evaluation ended: %s, accuracy %.1f%% of %d tasks (95%%: %.1f to %.1f)",
                name or "the tasks", 100 * report.accuracy, report.n, 100 * report.low, 100 * report.high,
            )  # fmt: skip
        raise


async def evaluate_sets(
    recipe: "Recipe",
    sets: Mapping[str, EvaluationSet],
    player: Player,
    endpoint: "Endpoint | None",
    record: type[Recording] = Recording,
) -> dict[str, Report]:
    """Evaluate on each set, which ``check_sets`` has checked, one after the other."""
    reports = dict[str, Report]()
    with telling_finished(reports):
        for name, additional in sets.items():
            settings = recipe.evaluation.of_set(additional)
            async with Closing() as closing:
                hosted = IsolatedEnvironments(additional.data.open())
                closing.closes(f"the environments of {name or 'the tasks'}", hosted.close)
                if player.renderer is not None:  # a model behind an API has none
                    judge = JudgeModel(player.generator, player.renderer, recipe.generator.max_context)
                    hosted.use_policy(judge.answer)
                tasks = held_out(additional.data, additional.split, additional.limit, player.renderer)
                with naming(name and f"the evaluation set {name}"):
                    reports[name] = await evaluate_tasks(
                        tasks, additional.data, hosted, player, settings.sampling(recipe.sampling), settings,
                        seed=recipe.seed, endpoint=endpoint, name=name, record=record,
                    )  # fmt: skip
    return reports


async def check_sets(sets: Mapping[str, EvaluationSet], renderer: Renderer | None) -> None:
    """Raise the error of a set that can't be evaluated, before another one takes its time: tasks that can't be read,
    have images, or are missing, and tools that the chat template doesn't write. ``renderer``: None for a model behind
    an API."""
    for name, additional in sets.items():
        with naming(name and f"the evaluation set {name}"):
            tasks = held_out(additional.data, additional.split, additional.limit, renderer)
            if not tasks:
                raise DataError(f"it has no task in the split {additional.split}; choose another split")
            if renderer is not None and not renderer.writes_tools:
                await _check_tools(additional.data, tasks, renderer)


async def _check_tools(data: TaskSet, tasks: Sequence[Task], renderer: Renderer) -> None:
    """Begin episodes of some tasks, and raise ``ConfigError`` if one offers tools."""
    async with Closing() as closing:
        environments = IsolatedEnvironments(data.open())
        closing.closes("the environments", environments.close)
        for task in tasks[:_ASKED]:
            if environments.program_for(task) is not None:
                return  # the endpoint answers for a program's own tools
            environment = environments.make(task)
            try:
                if (await environment.start()).tools:
                    renderer.check_tools()
            finally:
                await environment.close()


def _stated(taskset: TaskSet) -> Stated | None:
    """Return ``taskset.stated`` if its answers can be equal, so that majorities have a meaning."""
    return taskset.stated if taskset.states_answers else None


def held_out(taskset: TaskSet, split: str, limit: int | None, renderer: Renderer | None) -> list[Task]:
    """Return the first ``limit`` tasks of the split; of a blend, the first ``limit`` tasks of each environment."""
    taken = Counter[str]()
    tasks = []
    for task in tasks_of(taskset, split):
        check_images(renderer, task.prompt, f" of task {task.uid}")
        taken[task.environment] += 1
        if limit is None or taken[task.environment] <= limit:
            tasks.append(task)
    return tasks
