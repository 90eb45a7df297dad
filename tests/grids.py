"""Grids of test parameters, of which each run of the fast tests computes a diagonal."""

from collections.abc import Sequence
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
