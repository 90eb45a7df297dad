"""Layouts built from tensors equal layouts built token by token."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.groups import groups
from tests.reference.layout import forest_of, rows_of
from whet.core.batch import Batch
from whet.core.types import Group
from whet.models.attention.layout import ForestLayout, Gather
from whet.models.shards import Tokens
from whet.parallel.context import SpreadTokens, TokensInParts

COLUMNS = ("tokens", "position", "predictor", "sequence", "trained", "segment_start", "segment_parent")


def spread(rank: int, ranks: int) -> Tokens:
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    return SpreadTokens(group)


@settings(max_examples=80, deadline=None)
@given(groups(vocabulary=6), st.booleans(), st.randoms())
def test_a_batch_is_laid_out_as_it_is_token_by_token(made: list[Group], share: bool, random: Any) -> None:
    for span in (span for group in made for one in group.episodes for span in one.spans):
        if span.trained or random.random() < 0.3:
            span.logprobs = [random.uniform(-9, 0) for _ in span.tokens]
        span.reward = random.choice([0.0, 1.5])
    batch = Batch.from_groups(made, share_prompts=share)
    expected = forest_of(made, share)
    for name in COLUMNS:
        assert getattr(batch, name).tolist() == getattr(expected, name), name
    for name in ("rollout_logprobs", "turn_rewards"):
        found: Tensor | None = getattr(batch, name)
        assert found is None or torch.equal(found, torch.tensor(getattr(expected, name), dtype=found.dtype)), name


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from([1, 2, 3, 7, 40])), min_size=1, max_size=9),
    st.sampled_from([Tokens(), TokensInParts(8, 3), spread(0, 2), spread(1, 2), spread(2, 3)]),
)
def test_attention_rows_equal_rows_computed_token_by_token(segments: list[tuple[int, int]], tokens: Tokens) -> None:
    parents = [min(choice, index) - 1 for index, (choice, _) in enumerate(segments)]
    lengths = [length for _, length in segments]
    starts, size = [sum(lengths[:i]) for i in range(len(lengths))], sum(lengths)
    if padding := tokens.padded(size) - size:
        starts, parents, size = [*starts, size], [*parents, -1], size + padding
    found, expected = ForestLayout._of(starts, parents, size, "cpu", tokens), rows_of(starts, parents, size, tokens)
    assert [(b.rows, b.queries, b.keys, b.before.tolist()) for b in found.blocks] == expected.blocks
    for block in found.blocks:
        assert block.even == (len(set(block.before.tolist())) == 1)
        assert block.roots == (not any(block.before.tolist()))
    assert_picks(found.query, expected.query, len(expected.result))
    assert_picks(found.key, expected.key, size)
    assert_picks(found.result, expected.result, len(expected.query))


def assert_picks(found: Gather, expected: list[int], rows: int) -> None:
    assert found.index.tolist() == [max(row, 0) for row in expected], "padding picks the first row"
    picks = [[place for place, row in enumerate(expected) if row == wanted] for wanted in range(rows)]
    assert found.back.tolist() == [place for of_row in picks for place in of_row]
    assert found.bags.tolist() == [sum(map(len, picks[:row])) for row in range(rows)]
