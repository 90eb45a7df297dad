"""Checks, before anything is loaded, that the parts of an algorithm fit together, from the columns each reads and
fills.

Every column that a loss or an estimator reads must be filled by a part. And every part that a recipe sets up (an
estimator, a critic, a teacher) must have an effect: followed back from the main loss, one of its columns must be read.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from whet.algorithms.base import Algorithm, OnlineAlgorithm
from whet.algorithms.registry import ADVANTAGES, ALGORITHMS
from whet.config import Component, SettingsError
from whet.learner.config import OUTPUTS
from whet.losses.base import LOSSES

_UNITS = {"token": "single tokens", "sequence": "single replies", "group": "pairs of replies"}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a step: a loss, an estimator or the algorithm."""

    setting: str  # as in the recipe, such as "algorithm.loss = dpo"
    reads: frozenset[str]
    fills: frozenset[str]


def problems(algorithm: Algorithm) -> Iterator[str]:
    """Yield a description of each problem."""
    parts, name = list[_Part](), f"algorithm = {Component(ALGORITHMS).name_of(type(algorithm))}"
    if not isinstance(algorithm.roles, Mapping):
        yield f"{name}: `roles` must be a dict of roles by name; write @property above `def roles`"
        return
    if wrong := _not_names(algorithm, "fills"):
        yield f"{name} has {wrong}"
        return
    for role in algorithm.roles.values():
        if (loss := role.loss) is None:
            continue
        setting = f"algorithm.{role.key} = {Component(LOSSES).name_of(type(loss))}"
        if wrong := _not_names(loss, "reads", "outputs"):
            yield f"{setting} has {wrong}"
            return
        if loss.unit not in _UNITS:
            yield f"{setting} has `unit` = {loss.unit!r}, which must be one of {', '.join(map(repr, _UNITS))}"
            return
        parts.append(_Part(setting, loss.reads, frozenset(role.fills)))
        if loss.unit not in algorithm.units:
            here = " or ".join(_UNITS[unit] for unit in algorithm.units)
            yield f"{setting} trains on {_UNITS[loss.unit]}, but this algorithm provides {here}"
        if missing := loss.outputs - OUTPUTS[role.head]:
            here = f"this model has a {role.head} head, which outputs {_listed(OUTPUTS[role.head])}"
            yield f"{setting} needs the model's {_listed(missing)}, but {here}; choose another loss"
    if (estimator := algorithm.estimator) is not None:
        setting = f"algorithm.advantage = {Component(ADVANTAGES).name_of(type(estimator))}"
        if wrong := _not_names(estimator, "reads", "fills"):
            yield f"{setting} has {wrong}"
            return
        parts.append(_Part(setting, estimator.reads, estimator.fills))
        if isinstance(algorithm, OnlineAlgorithm) and algorithm.group_size == 1 and estimator.compares:
            yield (
                f"{setting} compares the answers to a task, so with algorithm.group_size = 1 it is always 0; set "
                "group_size to 2 or more, or choose another advantage"
            )
    parts.append(_Part(name, frozenset(), algorithm.fills))

    given = {"rollout_logprobs"} if isinstance(algorithm, OnlineAlgorithm) else set[str]()
    filled = given.union(*(part.fills for part in parts))
    live = parts[0].reads  # the columns that the main loss reads, directly or through other parts
    while more := frozenset[str]().union(*(part.reads for part in parts if part.fills & live)) - live:
        live |= more
    for part in parts:
        if unfilled := part.reads - filled:
            yield f"{part.setting} reads {_listed(unfilled)}, which no part of this algorithm fills; choose another"
    if estimator is not None and (marks := estimator.fills - {"advantages", "returns"} - live):
        yield f"{setting} fills {_listed(marks)}, which no part of this algorithm reads; choose another"
    read = frozenset[str]().union(*(part.reads for part in parts))
    dead = [part for part in parts[1:] if part.fills and not part.fills & live]
    # A part may be read by another part without effect; the last one in the chain comes first.
    for part in sorted(dead, key=lambda part: part.fills <= read):
        unused = part.fills - read or part.fills
        yield f"{part.setting} fills {_listed(unused)}, which no part of this algorithm reads; {_advice(unused)}"


def _not_names(part: object, *attributes: str) -> str:
    """Return which attribute is not a set of names, or an empty text."""
    for name in attributes:
        if not isinstance(value := getattr(part, name), Set):
            return f"`{name}` = {value!r}, which must be a set of names, as in {name}: ClassVar = frozenset({{'NAME'}})"
    return ""


def _advice(columns: Set[str]) -> str:
    """Name the built-in losses and advantages that read a column."""
    readers = []
    for key, registry in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        for name in registry:
            with suppress(SettingsError):  # raised if a setting is required
                part: Any = Component(registry).resolve(name)[0]()
                if part.reads & columns:
                    readers.append(f"algorithm.{key}={name}")
    return f"choose {' or '.join(readers)}" if readers else "leave it out"


def _listed(names: Set[str]) -> str:
    return ", ".join(sorted(names))
