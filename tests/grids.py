"""Grids of test parameters, of which each run of the fast tests computes a diagonal."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def grid(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Return all combinations of the axes' values. Each value is in a combination that is fast; the others are marked
    as slow."""
    longest = max(map(len, axes))
    fast = {tuple(index % len(axis) for axis in axes) for index in range(longest)}
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, place, strict=True)),
            marks=() if place in fast else pytest.mark.slow,
        )
        for place in product(*(range(len(axis)) for axis in axes))
    ]
