"""Comparison of tensors with a model by name, shape and dtype, before any of them is copied."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

_SHOWN = 3


@dataclass(slots=True, frozen=True)
class Mismatch:
    """The problems of tensors that do not fit, one sentence each. False if all fit."""

    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.problems)

    def __str__(self) -> str:
        more = len(self.problems) - _SHOWN
        return "; ".join(self.problems[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def match(
    given: Mapping[str, Tensor], expected: Mapping[str, Tensor], others: Collection[str] = (), *, types: bool = True
) -> Mismatch:
    """Compare names, shapes and, with ``types``, dtypes; values are not read, so both may be on ``meta``. ``others``
    are names that ``given`` may have in addition to ``expected``."""
    problems = [f"{name} is missing" for name in expected if name not in given]
    problems += [f"{name} is not of this model" for name in given if name not in expected and name not in others]
    for name in given.keys() & expected.keys():
        tensor, target = given[name], expected[name]
        if tensor.shape != target.shape or (types and tensor.dtype != target.dtype):
            problems.append(f"{name} is {_described(tensor, types)}, not {_described(target, types)}")
    return Mismatch(tuple(sorted(problems)))


def _described(tensor: Tensor, types: bool) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if types else f"{list(tensor.shape)}"
