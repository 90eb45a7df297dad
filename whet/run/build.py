"""Build the parts of a run, each from its section of the recipe: renderer, generator, learners."""

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.closing import Closing
from whet.base.errors import ConfigError, WhetError
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.core.types import Distribution
from whet.run.policies import models_of

_TOLERANCE_IN_8_BITS = 0.5  # nats, of the probe where the engine computes in 8 bits
_PROBE_PROMPT = 144  # tokens: more than a block of an engine's prefix cache, so that a kept cache shows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from whet.chat.renderer import Renderer
    from whet.cluster.base import Cluster
    from whet.cluster.lease import Devices
    from whet.engines.base import Engine
    from whet.learner.learner import WorkerLearner
    from whet.rollouts.session import Player
    from whet.run.recipe import Recipe
    from whet.weights.base import WeightSync
    from whet.weights.source import NamedTensors


def build_renderer(recipe: "Recipe") -> "Renderer":
    """Load the model's tokenizer with the recipe's chat template, or else its own."""
    from whet.chat.renderer import Renderer
    from whet.models.loading import load_images, load_tokenizer

    model = recipe.model
    images = None if model.vision is None else load_images(model)
    return Renderer(
        load_tokenizer(model), recipe.chat_template, recipe.template_arguments, recipe.tools_as_text, images
    )


def build_generator(recipe: "Recipe", renderer: "Renderer", cluster: "Cluster | None" = None) -> "Engine[object]":
    """Return a generator whose weights are still to be written. ``cluster``: where it runs with
    ``generator.on_cluster``."""
    from whet.engines.config import Adapter, Deployment
    from whet.models.loading import adapted_modules, load_images, load_model_config
    from whet.processes.machine import split_cores

    devices, lora, adapter = recipe.devices, recipe.model.lora, None
    if recipe.weights.lora == "adapter" and lora is not None:
        ends = sorted({name.rpartition(".")[2] for name in adapted_modules(recipe.model)})
        adapter = Adapter(lora.rank, tuple(ends))
    elif lora is not None and lora.target_modules != "all-linear" and not lora.experts:
        adapted_modules(recipe.model)  # refuses what can't be sent
    _, cores = split_cores(devices.learner_cores, devices.generator_cores)
    sleeps = devices.placement == "colocated"
    replays = recipe.rollouts.router_replay
    deployment = Deployment(
        cores,
        sleeps=sleeps,
        cluster=cluster,
        adapter=adapter,
        record_experts=replays,
        images=None if recipe.model.vision is None else load_images(recipe.model),
    )
    return recipe.generator.build(load_model_config(recipe.model), renderer.tokenizer, deployment)


def further_players(recipe: "Recipe", cluster: "Cluster | None") -> "dict[str, Player]":
    """Return the further policies of a run as players of their roles; their weights are still to be written."""
    from whet.rollouts.session import Player

    players = {}
    for name, policy_recipe in models_of(recipe):
        renderer = build_renderer(policy_recipe)
        players[name] = Player(build_generator(policy_recipe, renderer, cluster), renderer)
    return players


def build_sync(recipe: "Recipe", text: list[int], devices: "Devices | None" = None) -> "WeightSync":
    """Return the transfer of the policy's weights to the generator. Its probe reads ``text``, at least two tokens."""
    from whet.weights.engine import EngineSync
    from whet.weights.in_process import InProcessSync

    if recipe.generator.in_process:
        return InProcessSync(recipe.weights, text, devices)
    sampling, tokens = recipe.sampling, recipe.weights.probe_tokens
    length = max(1, min(_PROBE_PROMPT, sampling.max_prompt_tokens + sampling.max_new_tokens - tokens))
    repeated = (text * -(-length // len(text)))[:length]
    distribution = Distribution(temperature=sampling.distribution.temperature)
    weights = recipe.weights
    if recipe.generator.low_precision_setting and weights.probe_tolerance is None:
        weights = weights.model_copy(update={"probe_tolerance": _TOLERANCE_IN_8_BITS})
    return EngineSync(weights, repeated, distribution, devices)


def trained_weights(recipe: "Recipe", run: Path | None, policy: str = "") -> "NamedTensors":
    """Return the weights of a run's best checkpoint (the newest if none was evaluated), or of the recipe's model.
    ``policy`` is the name of a further policy, whose recipe is given."""
    import torch

    from whet.checkpoint.policy import load_policy
    from whet.checkpoint.store import CheckpointStore
    from whet.models.loading import load_model
    from whet.weights.named_weights import ModelWeights

    if run is None:
        return ModelWeights(load_model(recipe.model, dtype=torch.float32, train=False))
    store = CheckpointStore(run / "checkpoints", recipe.checkpoints)
    return ModelWeights(store.read(lambda checkpoint: load_policy(checkpoint, recipe.model, policy)))


@asynccontextmanager
async def open_generator(
    recipe: "Recipe", run: Path | None, model: str | None = None, policy: str = ""
) -> "AsyncIterator[tuple[Engine[object], Renderer]]":
    """Open a generator, and the renderer of its texts, with the weights of a run's best checkpoint, of another
    ``model``, or of the recipe's. ``policy`` is the name of a further policy, whose recipe is given. Nothing is
    trained."""
    from whet.processes.compute import compute
    from whet.run.machine import decide

    whole: JsonObject = {"lora": "merged"}  # weights come once, from this process
    if recipe.weights.transport == "cuda_ipc":
        whole["transport"] = None
    changes: JsonObject = {
        "weights": recipe.weights.model_copy(update=whole),
        "generator": recipe.generator.model_copy(update={"on_cluster": False}),
        "rollouts": recipe.rollouts.model_copy(update={"router_replay": False}),  # nothing is learned from it
    }
    if model is not None:
        changes["model"] = recipe.model.model_copy(update={"path": model, "lora": None, "revision": None})
    settings = (await compute(decide, recipe.model_copy(update=changes)))[0]
    renderer = build_renderer(settings)
    async with Closing() as closing:
        generator = build_generator(settings, renderer)
        closing.closes("the generator", generator.close)
        weights = await compute(trained_weights, settings, run, policy)
        await build_sync(settings, [0, 0]).load(weights, generator, 0)
        yield generator, renderer


def check_experts(recipe: "Recipe") -> None:
    """Raise ``ConfigError``, before anything is started, where the model lacks experts that the recipe is about."""
    from whet.algorithms.base import OnlineAlgorithm
    from whet.models.loading import load_model_config
    from whet.models.moe.routing import experts_missing

    replays = isinstance(recipe.algorithm, OnlineAlgorithm) and recipe.rollouts.router_replay
    balances = recipe.learner.balance is not None
    if (replays or balances) and (why := experts_missing(load_model_config(recipe.model), replays, balances)):
        raise ConfigError(why)


def check_megatron(recipe: "Recipe") -> None:
    """Raise ``ConfigError``, before anything is started, where Megatron Core is missing or can't build a model."""
    from whet.base.extras import require
    from whet.models.loading import load_model_config
    from whet.parallel.megatron.families import unsupported

    if recipe.learner.type != "megatron":
        return
    require("megatron", "learner.type=megatron", "megatron")
    for role, spec in recipe.algorithm.roles.items():
        if why := unsupported(load_model_config(spec.model_config(recipe.model))):
            raise ConfigError(f"learner.type=megatron can't build the {role}: {why}; use learner.type=torch")


def check_reward_model(recipe: "Recipe") -> None:
    """Raise ``ConfigError``, before anything is started, where a reward model could not be exported."""
    from whet.checkpoint.reward_model import choose_padding
    from whet.models.loading import load_model_config
    from whet.models.sequence_classifier import classifier_class

    if "reward_model" not in recipe.algorithm.roles:
        return
    renderer = build_renderer(recipe)  # not the run's: a padding token is set
    try:
        classifier_class(load_model_config(recipe.model))
        choose_padding(renderer.tokenizer, renderer, recipe.model)
    except (ValueError, WhetError) as error:
        raise ConfigError(f"a reward model of {recipe.model.path} could not be exported: {error}") from None


@asynccontextmanager
async def open_cluster(recipe: "Recipe") -> "AsyncIterator[Cluster]":
    """Start the cluster of the learners of all policies; it is closed at the end."""
    from whet.processes.machine import split_cores

    cores, _ = split_cores(recipe.devices.learner_cores, recipe.devices.generator_cores)
    async with Closing() as closing:
        cluster = recipe.cluster.build(cores, len(recipe.algorithm.roles) * (1 + len(recipe.policies)))
        closing.closes("the cluster", cluster.close)
        yield cluster


@asynccontextmanager
async def open_learners(
    recipe: "Recipe", folder: Path, cluster: "Cluster"
) -> "AsyncIterator[dict[str, WorkerLearner]]":
    """Start a learner for each role of the algorithm, trained or frozen, on the cluster. All are closed at the end,
    and if one can't be built."""
    recipe.algorithm.check_models(recipe.model)
    await recipe.algorithm.check_servers(recipe.model, recipe.longest)
    async with Closing() as closing:
        learners: dict[str, WorkerLearner] = {}
        for role in recipe.algorithm.roles:
            learners[role] = await build_learner(recipe, folder, cluster, role)
            closing.closes(f"the learner of {role}", learners[role].close)
        yield learners


async def build_learner(recipe: "Recipe", folder: Path, cluster: "Cluster", role: str = "policy") -> "WorkerLearner":
    """Start the workers of one role on the cluster and return their learner."""
    from whet.learner.config import WorkerConfig
    from whet.learner.learner import WorkerLearner

    algorithm, dumps = recipe.algorithm, folder / "skipped"
    spec = algorithm.roles[role]
    config = WorkerConfig(
        model=spec.model_config(recipe.model),
        learner=recipe.learner,
        parallel=recipe.parallel,
        optimizer=spec.optimizer(
            recipe.optimizer if role == algorithm.main_role else recipe.optimizer.model_copy(update={"groups": ()})
        ),
        head=spec.head,
        steps=max(1, recipe.steps - spec.starts_at) * algorithm.epochs * algorithm.minibatches,
        seed=derive_seed(recipe.seed, role),
        dumps=dumps if role == algorithm.main_role else dumps / role,
        follows_routes=role == algorithm.main_role,
    )
    return await WorkerLearner.launch(cluster, config)
