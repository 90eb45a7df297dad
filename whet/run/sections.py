"""Which sections of a recipe each part of a run reads. The parts are typed by these protocols rather than by the
recipe, so that none can read what its protocol doesn't name (mypy checks it); and what the parts of a run don't name is
read by nobody: given all the same, it is an error."""

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, get_type_hints

from pydantic import JsonValue

from whet.algorithms.base import Algorithm, OnlineAlgorithm
from whet.checkpoint.config import CheckpointConfig
from whet.cluster.config import ClusterConfig, DevicesConfig
from whet.config import Component, Config
from whet.data.rows import Rows
from whet.engines.config import GeneratorConfig
from whet.learner.config import LearnerConfig, OptimizerConfig
from whet.metrics.sinks import SinkConfig
from whet.models.config import ModelConfig
from whet.parallel.config import ParallelConfig
from whet.rollouts.config import RolloutConfig
from whet.rollouts.rewards import Reward
from whet.rollouts.sampling import Sampling
from whet.run.evaluate import EvaluationConfig, HeldOut
from whet.tasks.base import TaskSet
from whet.tasks.validate import ValidationConfig
from whet.weights.config import WeightSyncConfig

if TYPE_CHECKING:
    from whet.run.recipe import Recipe


# fmt: off
class ForTexts(Protocol):
    """How text becomes tokens."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def template_arguments(self) -> dict[str, JsonValue]: ...
    @property
    def tools_as_text(self) -> bool: ...


class _ForRun(Protocol):
    """What is common to the parts of a run."""

    @property
    def seed(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def algorithm(self) -> Algorithm: ...


class ForLearners(_ForRun, Protocol):
    """What is trained, how and where."""

    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def learner(self) -> LearnerConfig: ...
    @property
    def parallel(self) -> ParallelConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def devices(self) -> DevicesConfig: ...


class ForLoop(_ForRun, Protocol):
    """What happens in a step and between two."""

    @property
    def description(self) -> str: ...
    @property
    def evaluation(self) -> HeldOut: ...
    @property
    def checkpoints(self) -> CheckpointConfig: ...
    @property
    def sinks(self) -> tuple[SinkConfig, ...]: ...


class ForRows(_ForRun, Protocol):
    """A run that learns from rows."""

    @property
    def rows(self) -> Rows: ...
    @property
    def evaluation(self) -> HeldOut: ...


class ForSampling(Protocol):
    """A run whose policy answers tasks."""

    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def online(self) -> OnlineAlgorithm: ...
    @property
    def taskset(self) -> TaskSet: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def rewards(self) -> Reward: ...
    @property
    def rollouts(self) -> RolloutConfig: ...
    @property
    def generator(self) -> GeneratorConfig: ...
    @property
    def weights(self) -> WeightSyncConfig: ...
    @property
    def validation(self) -> ValidationConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def devices(self) -> DevicesConfig: ...
# fmt: on


def idle(recipe: "Recipe") -> Iterator[tuple[str, str]]:
    """Yield the key of each setting that isn't its default and is read only beside another one, which this recipe
    doesn't have; and when it would be read."""
    generator, weights, sampling, rollouts = recipe.generator, recipe.weights, recipe.sampling, recipe.rollouts
    beside: list[tuple[bool, str, str]] = [  # is it read, which settings, and when
        (recipe.optimizer.schedule != "constant", "optimizer.min_lr_ratio", "optimizer.schedule is linear or cosine"),
        (recipe.parallel.tensor > 1, "parallel.sequence_parallel", "parallel.tensor is more than 1"),
        (recipe.devices.placement == "colocated", "devices.deadline", "devices.placement = colocated"),
    ]
    if isinstance(recipe.algorithm, OnlineAlgorithm):
        budget, longest = sampling.thinking_budget, sampling.max_new_tokens
        ends = sampling.thinking != "off" and (budget is None or budget < longest)
        beside += [
            (generator.in_process or weights.transport == "disk", "weights.folder", "weights.transport = disk"),
            (
                generator.in_process or weights.transport == "collective",
                "weights.deadline",
                "weights.transport = collective",
            ),
            (generator.in_process or weights.digest, "weights.columns", "weights.digest = true"),
            (weights.probe, "weights.probe_tokens probe_tolerance", "weights.probe = true"),
            (generator.replicas > 1, "generator.slack restarts", "generator.replicas is 2 or more"),
            (recipe.devices.placement == "colocated", "generator.sleep_level", "devices.placement = colocated"),
            (
                rollouts.max_staleness > 0,
                "generator.on_refit",
                "rollouts.max_staleness is 1 or more: in step nothing is under way when new weights come",
            ),
            (sampling.max_turns > 1, "sampling.max_observation_tokens", "sampling.max_turns is 2 or more"),
            (
                ends,
                "sampling.thinking_budget",
                f"it is less than sampling.max_new_tokens = {longest}, and sampling.thinking is not off",
            ),
            (sampling.temperature > 0, "sampling.top_k top_p min_p", "sampling.temperature is not 0"),
            (rollouts.retries > 0, "rollouts.retry_delay", "rollouts.retries is 1 or more"),
        ]
    for is_read, keys, when in beside:
        section, _, names = keys.partition(".")
        for name in () if is_read else names.split():
            config: Config = getattr(recipe, section)
            field = type(config).model_fields.get(name)
            if field is not None and getattr(config, name) != field.default:
                yield f"{section}.{name}", when
    if recipe.algorithm.estimator is not None:
        for name, when in recipe.algorithm.estimator.idle():
            yield f"algorithm.advantage.{name}", when


def unread(recipe: "Recipe") -> Iterator[str]:
    """Yield the key of each setting that isn't its default and that no part of the recipe's run reads."""
    samples = isinstance(recipe.algorithm, OnlineAlgorithm)
    read: dict[str, list[type[Config]]] = {}
    for part in (ForTexts, ForLearners, ForLoop, ForSampling if samples else ForRows):
        for name, member in inspect.getmembers(part):
            if isinstance(member, property):
                read.setdefault(name, []).append(get_type_hints(member.fget)["return"])
    for name, field in type(recipe).model_fields.items():
        section, kinds = getattr(recipe, name), read.get(name, [])
        if field.is_required() or not isinstance(section, Config) or field.annotation in kinds:
            continue
        if any(one.name_of(type(section)) != field.default for one in field.metadata if isinstance(one, Component)):
            yield name
        known = {key for kind in kinds for key in kind.model_fields}
        yield from (f"{name}.{key}" for key in section.model_dump(exclude_defaults=True) if key not in known)
