"""Comparison of the outputs of several ranks with a single process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel.cases import Case, Said, train, train_all
from tests.parallel.ranks import on_ranks
from whet.parallel.config import ParallelConfig

Table = dict[str, tuple[str, dict, dict]]
"""By name: a model, its layout, and what is changed of a ``Case``."""


def tables(quick: Table, two: Table, four: Table) -> pytest.MarkDecorator:
    """Gives a test ``table``: two ranks, two ranks in every setting and four ranks, which are slow."""
    slow = [pytest.param(table, marks=pytest.mark.slow) for table in (two, four)]
    return pytest.mark.parametrize(
        "table", [quick, *slow], ids=["two ranks", "two ranks in every setting", "four ranks"]
    )


def check(models: dict[str, Path], table: Table, tolerance: float = 1e-12, cut: bool = False) -> None:
    """All cases of a table in one group of ranks, each against one process. The tolerance is that of sums in another
    order, as a share of the largest number. ``cut``: the one process has the same micro-batches."""
    cases = {}
    for name, (model, layout, more) in table.items():
        size = ParallelConfig(**layout)
        shards = size.ranks // size.ranks_per_shard
        cases[name] = Case(models[model], layout, **{"groups": 3 * shards} | more)  # two micro-batches for each shard
    ranks = {case.ranks for case in cases.values()}
    said = on_ranks(ranks.pop(), train_all, list(cases.values()))
    assert not ranks
    wrong = {}
    for index, (name, case) in enumerate(cases.items()):
        alone = replace(case, parallel={}) if cut else case.one_rank()
        found = list(differences(train("", 0, alone), [rank[index] for rank in said], case, tolerance))
        if found:
            wrong[name] = found
    assert not wrong


def differences(one: Said, many: list[Said], case: Case, tolerance: float) -> Iterator[str]:
    speakers = many[:: ParallelConfig(**case.parallel).ranks_per_shard]  # one for each shard of the data
    for when in ("scored", "scored_after"):
        columns = {name: sum(getattr(said, when)[name] for said in speakers) for name in one.scored}
        yield from far(when, getattr(one, when), columns, tolerance)
    for what in ("gradients", "weights"):
        assert set().union(*(getattr(said, what) for said in many)) == getattr(one, what).keys()
    losses = [sum(parts) for parts in zip(*(said.losses for said in speakers), strict=True)]
    assert losses == pytest.approx(one.losses, rel=tolerance)
    for said in many:
        assert said.norms == pytest.approx(one.norms, rel=tolerance)
        assert said.norms == many[0].norms  # bit for bit: ranks must never decide differently
        assert replace(said.described, ranks=1) == one.described
        yield from far("gradient", some(one.gradients, said.gradients), said.gradients, tolerance)
        yield from far("weight", some(one.weights, said.weights), said.weights, tolerance)
        yield from far("published weight", one.published, said.published, tolerance)


def some(expected: dict[str, Tensor], of: dict[str, Tensor]) -> dict[str, Tensor]:
    """The part of ``of`` that one rank has: in a pipeline, not all layers."""
    return {name: tensor for name, tensor in expected.items() if name in of}


def far(what: str, expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float) -> Iterator[str]:
    assert expected.keys() == found.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name in expected:
        error = float((expected[name] - found[name]).abs().max()) / scale
        if not error <= tolerance:
            yield f"{what} {name}: {error:.1e}"


def assert_scored_alike(alone: Said, said: Said) -> None:
    """To the last bit, on this shard's tokens."""
    for name, column in alone.scored.items():
        there = said.scored[name] != 0
        assert there.any()
        assert torch.equal(said.scored[name][there], column[there]), name


def worst_error(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of the parameter that is furthest off, as a share of its gradient."""
    return max(float(((gradients[name] - g) ** 2).sum() / (g**2).sum()) for name, g in exact.items()) ** 0.5
