"""The part of NumPy that the tests of HumanEval+ and MBPP+ use, for sandboxes without NumPy."""

import math
from typing import Any

float32 = float64 = float


class ndarray:
    """A class without instances."""


def isclose(actual: object, expected: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether two numbers are close, like NumPy: ``rtol`` is relative to ``expected``."""
    difference = abs(actual - expected)
    return bool(actual == expected or (math.isfinite(abs(expected)) and difference <= atol + rtol * abs(expected)))


def allclose(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether all numbers are close. The shapes must be equal, because nothing is broadcast."""
    lists = [isinstance(value, list | tuple) for value in (actual, expected)]
    if not any(lists):
        return isclose(actual, expected, rtol, atol)
    return (
        all(lists)
        and len(actual) == len(expected)
        and all(allclose(*pair, rtol, atol) for pair in zip(actual, expected, strict=True))
    )
