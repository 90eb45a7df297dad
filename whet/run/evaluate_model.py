"""Evaluation of a model outside of a run: it is opened for this, or asked at its address."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.closing import Closing
from whet.base.progress import PROGRESS
from whet.endpoint.judge_model import JudgeModel
from whet.endpoint.server import Endpoint
from whet.rollouts.session import Player
from whet.run.build import open_generator
from whet.run.evaluate import check_sets, evaluate_recipe, evaluate_sets
from whet.run.evaluation import EvaluationSet
from whet.run.policies import models_of
from whet.run.remote_model import RemoteModel, RemoteRecording, check_for_endpoint
from whet.run.scores import Report
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.judges.config import check_has_no_own_judge

if TYPE_CHECKING:
    from whet.run.recipe import Recipe


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
    """Evaluate the recipe's model, another ``model`` (name, folder or Hub id), or the best checkpoint of a ``run``. The
    recipe's further policies are evaluated, too; another model plays every role. Needs a compute thread: see
    ``run_computing``."""
    taskset = recipe.taskset  # raises before a model is loaded
    changes = {"split": split, "limit": limit, "samples": samples, "temperature": temperature}
    given = {name: value for name, value in changes.items() if value is not None}
    settings = recipe.evaluated_with(given)
    async with Closing() as closing:
        environments = IsolatedEnvironments(taskset.open())
        closing.closes("the environments", environments.close)
        main = Player(*await closing.enter_async_context(open_generator(settings, run, model)))
        further = {}
        for name, policy_recipe in models_of(settings) if model is None else ():
            further[name] = Player(*await closing.enter_async_context(open_generator(policy_recipe, run, policy=name)))
        judge = JudgeModel(main.generator, main.renderer, settings.generator.max_context)
        environments.use_policy(judge.answer)
        endpoint = Endpoint(main.renderer, recipe.endpoint)
        closing.closes("the endpoint", endpoint.close)
        PROGRESS.begin("evaluating")
        await check_sets(settings.evaluation.sets, main.renderer)
        return await evaluate_recipe(settings, environments, main, endpoint, further)


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
    async with Closing() as closing:
        PROGRESS.begin("evaluating")
        if address is not None:
            check_has_no_own_judge(sets)
            check_for_endpoint(recipe.sampling, sets)
            remote: Any = RemoteModel(*address)
            closing.closes("the client of the endpoint", remote.close)
            nothing: Any = None  # the endpoint renders
            await check_sets(sets, None)
            return await evaluate_sets(recipe, sets, Player(remote, nothing), None, RemoteRecording)
        player = Player(*await closing.enter_async_context(open_generator(recipe, run, model)))
        endpoint = Endpoint(player.renderer, recipe.endpoint)
        closing.closes("the endpoint", endpoint.close)
        await check_sets(sets, player.renderer)
        return await evaluate_sets(recipe, sets, player, endpoint)
