"""Do the parts of an algorithm fit together? Found by what each reads and fills, before anything is loaded.

Every column that a loss or an estimator reads must be filled by somebody. And every part that a recipe sets up (an
estimator, a critic, a teacher) must be of use: going back from the main loss, something that it fills must be read.
"""

from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from whet.algorithms.base import Algorithm, OnlineAlgorithm
from whet.algorithms.registry import ADVANTAGES, ALGORITHMS
from whet.config import Component
from whet.learner.config import OUTPUTS
from whet.losses.registry import LOSSES

_UNITS = {"token": "single tokens", "sequence": "single replies", "group": "pairs of replies"}


@dataclass(frozen=True, slots=True)
class _Part:
    """What takes part in a step."""

    called: str  # as in the recipe
    reads: frozenset[str]
    fills: frozenset[str]


def problems(algorithm: Algorithm) -> Iterator[str]:
    """Yield in words what doesn't fit together."""
    parts = list[_Part]()
    for role in algorithm.roles.values():
        if (loss := role.loss) is None:
            continue
        called = f"algorithm.{role.key} = {Component(LOSSES).name_of(type(loss))}"
        parts.append(_Part(called, loss.reads, frozenset(role.fills)))
        if loss.unit not in algorithm.units:
            here = " or ".join(_UNITS[unit] for unit in algorithm.units)
            yield f"{called} learns from {_UNITS[loss.unit]}, and this algorithm has {here}"
        if unsaid := loss.outputs - OUTPUTS[role.head]:
            here = f"this model has a {role.head} head, which gives {_listed(OUTPUTS[role.head])}"
            yield f"{called} learns from a model's {_listed(unsaid)}, and {here}; choose another"
    if (estimator := algorithm.estimator) is not None:
        called = f"algorithm.advantage = {Component(ADVANTAGES).name_of(type(estimator))}"
        parts.append(_Part(called, estimator.reads, estimator.fills))
        if isinstance(algorithm, OnlineAlgorithm) and algorithm.group_size == 1 and estimator.compares:
            yield (
                f"{called} compares the answers to a task, and with algorithm.group_size = 1 it is always 0; set "
                "group_size to 2 or more, or choose another"
            )
    parts.append(_Part(f"algorithm = {Component(ALGORITHMS).name_of(type(algorithm))}", frozenset(), algorithm.fills))

    given = {"rollout_logprobs"} if isinstance(algorithm, OnlineAlgorithm) else set[str]()
    filled = given.union(*(part.fills for part in parts))
    live = parts[0].reads  # what the main loss reads, and what is read to fill that
    while more := frozenset[str]().union(*(part.reads for part in parts if part.fills & live)) - live:
        live |= more
    for part in parts:
        if unfilled := part.reads - filled:
            yield f"{part.called} reads {_listed(unfilled)}, which nothing fills here; choose another"
    read = frozenset[str]().union(*(part.reads for part in parts))
    dead = [part for part in parts[1:] if part.fills and not part.fills & live]
    # One of these may be read by another one: the last of them is to blame.
    for part in sorted(dead, key=lambda part: part.fills <= read):
        unread = part.fills - read or part.fills
        yield f"{part.called} fills {_listed(unread)}, which nothing reads here; {_advice(unread)}"


def _advice(columns: Set[str]) -> str:
    """Name the built-in losses and advantages that read a column."""
    found = []
    for key, registry in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        for name in registry:
            with suppress(ValidationError):  # where settings are required
                part: Any = Component(registry).resolve(name)[0]()
                if part.reads & columns:
                    found.append(f"algorithm.{key}={name}")
    return f"choose {' or '.join(found)}" if found else "leave it out"


def _listed(names: Set[str]) -> str:
    return ", ".join(sorted(names))
