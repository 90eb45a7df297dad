"""What the tests of HumanEval+ and MBPP+ use of NumPy, for sandboxes that can't read the real one."""

import math
from typing import Any

float32 = float64 = float


class ndarray:
    """Nothing is one here."""


def isclose(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """As NumPy has it, for numbers: the second one is what the tolerance is relative to."""
    difference = abs(one - other)
    return bool(one == other or (math.isfinite(abs(other)) and difference <= atol + rtol * abs(other)))


def allclose(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Whether all numbers are close; of one shape, for nothing is repeated to fit."""
    lists = [isinstance(value, list | tuple) for value in (one, other)]
    if not any(lists):
        return isclose(one, other, rtol, atol)
    return (
        all(lists)
        and len(one) == len(other)
        and all(allclose(*pair, rtol, atol) for pair in zip(one, other, strict=True))
    )
