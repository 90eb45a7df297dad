"""Settings that no part of a run reads. Each is an error if it is given, because its author expects an effect."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.algorithms.base import OnlineAlgorithm
from whet.config import Component, Config
from whet.run.evaluation import HeldOut

if TYPE_CHECKING:
    from whet.run.recipe import Recipe

_SAMPLING = ("sampling", "rewards", "rollouts", "endpoint", "generator", "weights", "validation")
"""Sections that only runs with a sampling policy read."""


def idle(recipe: "Recipe") -> Iterator[tuple[str, str]]:
    """Yield the key of each setting that isn't its default and that is read only together with another setting, which
    this recipe doesn't have; and the condition under which it is read."""
    generator, weights, sampling, rollouts = recipe.generator, recipe.weights, recipe.sampling, recipe.rollouts
    conditions: list[tuple[bool, str, str]] = [  # is it read, which settings, and when
        (recipe.optimizer.schedule != "constant", "optimizer.min_lr_ratio", "optimizer.schedule is linear or cosine"),
        (recipe.parallel.tensor > 1, "parallel.sequence_parallel", "parallel.tensor is more than 1"),
        (recipe.devices.placement == "colocated", "devices.deadline", "devices.placement = colocated"),
        (bool(recipe.profile.steps), "profile.micro_batches", "profile.steps names steps"),
    ]
    if isinstance(recipe.algorithm, OnlineAlgorithm):
        budget, longest = sampling.thinking_budget, sampling.max_new_tokens
        ends = sampling.thinking != "off" and (budget is None or budget < longest)
        conditions += [
            (generator.in_process or weights.transport == "disk", "weights.folder", "weights.transport = disk"),
            (
                generator.in_process or weights.transport == "collective",
                "weights.deadline",
                "weights.transport = collective",
            ),
            (generator.in_process or weights.digest, "weights.columns", "weights.digest = true"),
            (weights.probe, "weights.probe_tokens probe_tolerance", "weights.probe = true"),
            (generator.replicas > 1, "generator.prefix_weight restarts", "generator.replicas is 2 or more"),
            (recipe.devices.placement == "colocated", "generator.sleep_level", "devices.placement = colocated"),
            (
                rollouts.max_staleness > 0,
                "generator.on_refit",
                "rollouts.max_staleness is 1 or more: with 0, no request is in flight when new weights come",
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
    for is_read, keys, when in conditions:
        section, _, names = keys.partition(".")
        for name in () if is_read else names.split():
            config = recipe.value_of(section)
            assert isinstance(config, Config)
            if name in type(config).model_fields and config.changed([name]):
                yield f"{section}.{name}", when
    if recipe.algorithm.estimator is not None:
        for name, when in recipe.algorithm.estimator.idle():
            yield f"algorithm.advantage.{name}", when


def unread_by_rows(recipe: "Recipe") -> Iterator[str]:
    """Yield the key of each setting that isn't its default and that a run which learns from rows does not read."""
    if isinstance(recipe.algorithm, OnlineAlgorithm):
        return
    for name in (*_SAMPLING, "evaluation"):
        section, field = recipe.value_of(name), type(recipe).model_fields[name]
        assert isinstance(section, Config)
        components = [part for part in field.metadata if isinstance(part, Component)]
        if any(component.name_of(type(section)) != field.default for component in components):
            yield name
        read = HeldOut.model_fields if name == "evaluation" else {}
        yield from (f"{name}.{key}" for key in section.model_dump(exclude_defaults=True) if key not in read)
