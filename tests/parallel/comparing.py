"""Comparison of the outputs of several ranks with a single process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel.cases import Case, Outputs, train, train_all
from tests.parallel.ranks import on_ranks
from whet.parallel.config import ParallelConfig

Table = dict[str, tuple[str, dict, dict]]
"""By name: a model, its layout, and other fields of a ``Case``."""


def tables(quick: Table, two: Table, four: Table) -> pytest.MarkDecorator:
    """Parametrize a test with ``table``: two ranks; and as slow tests, two ranks in every setting and four ranks."""
    slow = [pytest.param(table, marks=pytest.mark.slow) for table in (two, four)]
    return pytest.mark.parametrize(
        "table", [quick, *slow], ids=["two ranks", "two ranks in every setting", "four ranks"]
    )


def check(models: dict[str, Path], table: Table, tolerance: float = 1e-12, cut: bool = False) -> None:
    """Compare all cases of a table, in one group of ranks, with a single process. ``tolerance``: for sums in another
    order, relative to the largest number. ``cut``: the single process has the same micro-batches."""
    cases = {}
    for name, (model, layout, more) in table.items():
        size = ParallelConfig(**layout)
        shards = size.ranks // size.ranks_per_shard
        cases[name] = Case(models[model], layout, **{"groups": 3 * shards} | more)  # two micro-batches for each shard
    ranks = {case.ranks for case in cases.values()}
    outputs = on_ranks(ranks.pop(), train_all, list(cases.values()))
    assert not ranks
    wrong = []
    for index, (name, case) in enumerate(cases.items()):
        alone = replace(case.one_rank(), max_tokens=case.max_tokens) if cut else case.one_rank()
        found = differences(train("", 0, alone), [rank[index] for rank in outputs], case, tolerance)
        wrong += [f"{name}: {difference}" for difference in found]
    assert not wrong, "\n".join(wrong)


def differences(alone: Outputs, ranks: list[Outputs], case: Case, tolerance: float) -> Iterator[str]:
    """Yield a description of each tensor that differs too much between ``alone``, on one rank, and ``ranks``."""
    leaders = ranks[:: ParallelConfig(**case.parallel).ranks_per_shard]  # one for each shard of the data
    for when in ("scored", "scored_after"):
        columns = {name: sum(getattr(outputs, when)[name] for outputs in leaders) for name in alone.scored}
        yield from deviations(when, getattr(alone, when), columns, tolerance)
    for what in ("gradients", "weights"):
        assert set().union(*(getattr(outputs, what) for outputs in ranks)) == getattr(alone, what).keys()
    losses = [sum(parts) for parts in zip(*(outputs.losses for outputs in leaders), strict=True)]
    assert losses == pytest.approx(alone.losses, rel=tolerance)
    for outputs in ranks:
        assert outputs.norms == pytest.approx(alone.norms, rel=tolerance)
        assert outputs.norms == ranks[0].norms  # bit for bit, so that ranks decide alike
        assert replace(outputs.described, ranks=1) == alone.described
        yield from deviations("gradient", restricted(alone.gradients, outputs.gradients), outputs.gradients, tolerance)
        yield from deviations("weight", restricted(alone.weights, outputs.weights), outputs.weights, tolerance)
        yield from deviations("published weight", alone.published, outputs.published, tolerance)


def restricted(expected: dict[str, Tensor], of: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the expected tensors that a rank has: in a pipeline, not all layers."""
    return {name: tensor for name, tensor in expected.items() if name in of}


def deviations(what: str, expected: dict[str, Tensor], actual: dict[str, Tensor], tolerance: float) -> Iterator[str]:
    """Yield a description of each tensor that differs by more than ``tolerance``, relative to the largest number."""
    assert expected.keys() == actual.keys()
    scale = max((float(tensor.abs().max()) for tensor in expected.values()), default=0.0)  # a stage may have none
    for name in expected:
        error = float((expected[name] - actual[name]).abs().max()) / scale
        if not error <= tolerance:
            yield f"{what} {name} differs by {error:.1e} of the largest number, more than {tolerance:.1e}"


def assert_scored_alike(alone: Outputs, outputs: Outputs) -> None:
    """Assert that the scores of this shard's tokens are equal, bit for bit."""
    for name, column in alone.scored.items():
        local = outputs.scored[name] != 0
        assert local.any()
        assert torch.equal(outputs.scored[name][local], column[local]), name


def worst_error(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient."""
    return max(float(((gradients[name] - g) ** 2).sum() / (g**2).sum()) for name, g in exact.items()) ** 0.5
