"""The checks of ``benchmarks/gpu.py``, as tests find them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu


def names(part: str) -> list[str]:
    return gpu.names_of([part])


__all__ = ["gpu", "names"]
