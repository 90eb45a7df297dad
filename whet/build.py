"""The parts of a run, each from its section of the recipe: renderer, generator, learner. Knows no loop."""

from pathlib import Path
from typing import TYPE_CHECKING

from whet.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from whet.cluster.base import Cluster
    from whet.data.renderer import Renderer
    from whet.learner.learner import WorkerLearner
    from whet.recipe import Recipe
    from whet.weights.in_process import Refittable


def build_renderer(recipe: "Recipe") -> "Renderer":
    """The model's tokenizer with the recipe's chat template, or else its own."""
    from whet.data.renderer import Renderer
    from whet.models.loading import load_tokenizer

    return Renderer(load_tokenizer(recipe.model), recipe.chat_template)


def build_generator(recipe: "Recipe", renderer: "Renderer") -> "Refittable":
    """A generator whose weights are still to be written."""
    from whet.models.loading import load_model_config

    return recipe.generator.build(load_model_config(recipe.model), renderer.tokenizer)


def trained_weights(recipe: "Recipe", run: Path | None) -> "Iterator[tuple[str, Tensor]]":
    """The weights of a run's best checkpoint (its newest, where none was evaluated), or else of the recipe's model."""
    import torch

    from whet.checkpoint.export import load_policy
    from whet.checkpoint.store import CheckpointStore
    from whet.learner.named_weights import named_weights
    from whet.models.loading import load_model

    if run is None:
        plain = recipe.model.model_copy(update={"lora": None})
        return named_weights(load_model(plain, dtype=torch.float32, train=False))
    store = CheckpointStore(run / "checkpoints", recipe.checkpoints)
    return named_weights(load_policy(store.load(), recipe.model))


async def build_learners(recipe: "Recipe", folder: Path, cluster: "Cluster") -> "dict[str, WorkerLearner]":
    """A learner for each role of the algorithm. None is left over where one can't be built."""
    learners: dict[str, WorkerLearner] = {}
    try:
        for role in recipe.algorithm.heads:
            learners[role] = await build_learner(recipe, folder, cluster, role)
    except BaseException:
        for learner in learners.values():
            await learner.close()
        raise
    return learners


async def build_learner(recipe: "Recipe", folder: Path, cluster: "Cluster", role: str = "policy") -> "WorkerLearner":
    """The learner of one role, with its workers started on the cluster."""
    from whet.learner.learner import WorkerLearner
    from whet.learner.worker import WorkerConfig

    algorithm, dumps = recipe.algorithm, folder / "skipped"
    config = WorkerConfig(
        model=recipe.model,
        learner=recipe.learner,
        optimizer=algorithm.optimizer(role, recipe.optimizer),
        head=algorithm.heads[role],
        steps=algorithm.updates(role, recipe.steps),
        seed=derive_seed(recipe.seed, role),
        dumps=dumps if role == algorithm.main_role else dumps / role,
    )
    return await WorkerLearner.launch(cluster, config)
