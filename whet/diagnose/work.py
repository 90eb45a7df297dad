"""The work of a run, counted from its data before anything is started: rows or tasks, steps, and tokens.

Groups stand for the steps: rows as they will be rendered, or prompts with answers of the maximal length. Nothing is
downloaded, and no model is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from whet.algorithms.base import OnlineAlgorithm
from whet.base.errors import DataError, naming
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.types import Episode, Group, Span, Task, Trajectory
from whet.fetch.download import no_downloads
from whet.models.attention.forest import supports_forest
from whet.models.loading import load_model_config
from whet.rollouts.blend import Blend
from whet.rollouts.sampling import Sampling
from whet.run.build import build_renderer
from whet.run.evaluate import held_out
from whet.run.evaluation import EvaluationSet
from whet.tasks.base import TaskSet
from whet.tasks.listing import tasks_of

if TYPE_CHECKING:
    from whet.run.recipe import Recipe

T = TypeVar("T")

_SAMPLE = 256  # rows or tasks whose tokens are counted; their mean stands for all
_TOKENS = 2**24  # of answers that are laid out; with long answers, fewer tasks are counted


@dataclass(slots=True)
class Work:
    """Counts of a whole run. With ``tokens`` of a step, a prompt that answers share counts once."""

    unit: str  # what an epoch consists of: "rows" or "tasks"
    train: int  # rows or tasks in an epoch
    held_out: int  # rows or tasks of an evaluation, without additional sets
    sets: dict[str, int]  # tasks of each additional set
    evaluations: int
    steps: int  # of the loop
    optimizer_steps: int
    steps_per_epoch: float
    tokens_per_step: int  # mean number of tokens that the learner reads
    trained_per_step: int
    tokens_per_epoch: int
    trained_per_epoch: int
    at_most: bool  # True if answers were counted with their maximal length
    counted: int  # the number of rows or tasks whose tokens were counted; the others are taken to be like them
    unusable: int  # rows among these that will be left out, for example for their length


@dataclass(slots=True)
class Samples:
    """Groups that stand for the steps of a run, and for its evaluation."""

    steps: list[Batch]
    groups: int  # in ``steps``
    evaluations: "dict[str, Measured]"  # by the name of the set; empty for the held-out rows or tasks of the run


@dataclass(slots=True)
class Measured:
    """Rows or tasks of one evaluation."""

    number: int
    batches: list[Batch]
    counted: int  # of them in ``batches``


def count_work(recipe: "Recipe") -> tuple["Recipe", Work, Samples]:
    """Read and count the data of a recipe. Return the recipe with its number of steps, the counts and groups that stand
    for its steps. Raises ``DataError`` for data that can't be read, or that is not on this machine."""
    with no_downloads("a plan downloads nothing"):
        renderer = build_renderer(recipe)
        if isinstance(recipe.algorithm, OnlineAlgorithm):
            return _count_tasks(recipe, renderer)
        return _count_rows(recipe, renderer)


def _count_rows(recipe: "Recipe", renderer: Renderer) -> tuple["Recipe", Work, Samples]:
    data, evaluation = recipe.rows, recipe.evaluation
    with naming("data"):
        rows = data.groups(renderer, judging=recipe.algorithm.main.head == "value")
    chosen = _spread(rows["train"])
    taken = [group for group in chosen if isinstance(group, Group)]
    if not taken:
        raise DataError(f"none of the first {len(chosen)} rows can be trained on: {chosen[0] if chosen else 'no rows'}")
    tested = rows[evaluation.split]
    number = min(len(tested), evaluation.limit or len(tested))
    measured = [group for group in _spread(tested, number) if isinstance(group, Group)]
    usable = len(rows["train"]) * len(taken) // len(chosen)
    recipe = recipe.with_steps(len(rows["train"]))
    steps, tests = (_batches(recipe, groups, data.batch_size) for groups in (taken, measured))
    samples = Samples(steps, len(taken), {"": Measured(number, tests, len(measured))})
    work = _work(recipe, "rows", len(rows["train"]), samples, data.batch_size)
    work.unusable = len(chosen) - len(taken)
    work.tokens_per_epoch = round(work.tokens_per_epoch * usable / len(rows["train"]))
    work.trained_per_epoch = round(work.trained_per_epoch * usable / len(rows["train"]))
    return recipe, work, samples


def _count_tasks(recipe: "Recipe", renderer: Renderer) -> tuple["Recipe", Work, Samples]:
    data, evaluation, size = recipe.taskset, recipe.evaluation, recipe.online.group_size
    with naming("data"):
        tasks = tasks_of(data, "train")
    if not tasks:
        raise DataError("the task set has no task to train on")
    answers = _answered(data, renderer, _drawn(recipe, tasks), size, recipe.sampling)
    evaluations = {}
    if evaluation.enabled:
        of_run = EvaluationSet(data=data, split=evaluation.split, limit=evaluation.limit)
        for name, each in {"": of_run, **evaluation.sets}.items():
            with naming(f"the evaluation set {name}" if name else "data"):
                evaluations[name] = _measured(recipe, renderer, each)
    recipe = recipe.with_steps(len(tasks))
    prompts = recipe.rollouts.prompts_per_step
    samples = Samples(_batches(recipe, answers, prompts), len(answers), evaluations)
    work = _work(recipe, "tasks", len(tasks), samples, prompts)
    work.at_most = True
    return recipe, work, samples


def _measured(recipe: "Recipe", renderer: Renderer, tested: EvaluationSet) -> Measured:
    """Return the tasks of an evaluation with their answers."""
    tasks = held_out(tested.data, tested.split, tested.limit, renderer)
    settings = recipe.evaluation.of_set(tested)
    groups = _answered(tested.data, renderer, tasks, settings.samples, settings.sampling(recipe.sampling))
    return Measured(len(tasks), _batches(recipe, groups, _SAMPLE), len(groups))


def _work(recipe: "Recipe", unit: str, train: int, samples: Samples, per_step: int) -> Work:
    """Return the counts of a run of ``per_step`` groups in a step."""
    algorithm, every = recipe.algorithm, recipe.evaluation.every
    tokens = sum(map(len, samples.steps)) / samples.groups
    trained = sum(int(batch.trained.sum()) for batch in samples.steps) / samples.groups
    measured = {0, recipe.steps, *(range(every, recipe.steps, every) if every else ())}
    tested = {name: each.number for name, each in samples.evaluations.items()}
    held_out = tested.pop("", 0)
    return Work(
        unit=unit,
        train=train,
        held_out=held_out,
        sets=tested,
        evaluations=len(measured) if recipe.evaluation.enabled and (held_out or tested) else 0,
        steps=recipe.steps,
        optimizer_steps=recipe.steps * algorithm.epochs * algorithm.minibatches,
        steps_per_epoch=train / per_step,
        tokens_per_step=round(tokens * per_step),
        trained_per_step=round(trained * per_step),
        tokens_per_epoch=round(tokens * train),
        trained_per_epoch=round(trained * train),
        at_most=False,
        counted=samples.groups,
        unusable=0,
    )


def _spread(items: Sequence[T], limit: int | None = None, most: int = _SAMPLE) -> list[T]:
    """Return at most ``_SAMPLE`` and ``most`` of the first ``limit`` items, at equal distances."""
    size = len(items) if limit is None else limit
    count = min(size, _SAMPLE, most)
    return [items[index * size // count] for index in range(count)]


def _drawn(recipe: "Recipe", tasks: Sequence[Task]) -> Sequence[Task]:
    """Return the tasks; of a blend as many as it would draw, by the weights of its environments."""
    if not isinstance(recipe.data, Blend):
        return tasks
    sampler = recipe.data.sampler_for(tasks, recipe.seed)
    return [tasks[sampler.draw(0, ())] for _ in range(_SAMPLE)]


def _answered(
    data: TaskSet, renderer: Renderer, tasks: Sequence[Task], answers: int, sampling: Sampling
) -> list[Group]:
    """Return some of the tasks, each with answers of the greatest length that its sampling allows."""
    blend = data if isinstance(data, Blend) else None
    chosen = _spread(tasks, most=max(1, _TOKENS // (answers * sampling.longest)))
    groups = []
    for task in chosen:
        limits = blend.of[task.environment].sampling.under(sampling) if blend else sampling
        prompt = renderer.render_prompt(task.prompt)[: limits.max_prompt_tokens]
        size = limits.max_new_tokens
        if limits.max_turns > 1:
            size = max(size, limits.longest - len(prompt))
        reply = Span(range(size), trained=True, logprobs=[0.0] * size, versions=(0, 0))
        episodes = [Episode([Trajectory([Span(prompt, trained=False), reply])]) for _ in range(answers)]
        groups.append(Group(task.uid, task, episodes))
    return groups


def _batches(recipe: "Recipe", groups: list[Group], size: int) -> list[Batch]:
    """Lay out the groups as steps of ``size`` groups; the last one may have fewer."""
    shared = supports_forest(load_model_config(recipe.model))
    steps = (groups[start : start + size] for start in range(0, len(groups), size))
    return [Batch.from_groups(step, share_prompts=shared) for step in steps]
