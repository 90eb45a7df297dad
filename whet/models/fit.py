"""Compare tensors with a model by name, shape and type, before any of them is copied."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

_SHOWN = 3


@dataclass(slots=True, frozen=True)
class Mismatch:
    """The problems of tensors that do not fit, one sentence each. False where all fit."""

    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.problems)

    def __str__(self) -> str:
        more = len(self.problems) - _SHOWN
        return "; ".join(self.problems[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def match(
    given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], others: Collection[str] = (), *, types: bool = True
) -> Mismatch:
    """Compare names, shapes and, with ``types``, dtypes; no number is read, so both may be on ``meta``. ``others`` are
    names that may be given beside those that are wanted."""
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is not of this model" for name in given if name not in wanted and name not in others]
    for name in given.keys() & wanted.keys():
        found, want = given[name], wanted[name]
        if found.shape != want.shape or (types and found.dtype != want.dtype):
            problems.append(f"{name} is {_described(found, types)}, not {_described(want, types)}")
    return Mismatch(tuple(sorted(problems)))


def _described(tensor: Tensor, types: bool) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if types else f"{list(tensor.shape)}"
