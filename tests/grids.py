"""Parameters of tests of which each run of the fast tests has some: the others are slow, and take turns."""

from collections.abc import Container, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def grid(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the axes' values, for ``parametrize``. Each value is in a combination that is fast;
    the others are marked as slow."""
    longest = max(map(len, axes))
    fast = {tuple(index % len(axis) for axis in axes) for index in range(longest)}
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, place, strict=True)),
            marks=() if place in fast else pytest.mark.slow,
        )
        for place in product(*(range(len(axis)) for axis in axes))
    ]


def taking_turns(values: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """Return the values, for ``parametrize``; values that are not in ``fast`` are marked as slow."""
    return [pytest.param(value, marks=() if value in fast else pytest.mark.slow) for value in values]
