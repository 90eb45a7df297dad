"""Packing into micro-batches keeps every token, repeats no trained token and respects the size limit."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.groups import group, groups
from whet.base.errors import DataError
from whet.core.batch import Batch
from whet.core.packing import pack


@settings(max_examples=60, deadline=None)
@given(groups(), st.integers(1, 4), st.integers(30, 80), st.sampled_from(["token", "group"]))
def test_every_trained_token_lies_in_exactly_one_micro_batch(made, ranks, extra, unit):
    batch = Batch.from_groups(made).weigh("token")
    bound = extra + (200 if unit == "token" else 500)  # a group of up to eight branches
    layout = pack(batch, ranks, bound, unit)

    assert len(layout) == ranks
    assert len({len(micro) for micro in layout}) == 1, "every rank takes part in as many collectives"
    seen = torch.zeros(len(batch), dtype=torch.long)
    for micro in (m for rank in layout for m in rank):
        assert len(micro.batch) <= bound
        assert torch.equal(micro.batch.tokens, batch.tokens[micro.tokens])
        seen[micro.tokens[micro.batch.trained]] += 1
    assert torch.equal(seen, batch.trained.long())


@settings(max_examples=40, deadline=None)
@given(groups())
def test_some_sequences_of_a_batch_can_be_packed_alone(made):
    batch = Batch.from_groups(made)
    chosen = torch.arange(0, batch.sequences, 2)
    tokens = torch.cat(batch.select(chosen)[0].paths())
    micros = [micro for shard in pack(batch, 2, 500, sequences=chosen) for micro in shard]
    assert all(torch.equal(micro.batch.tokens, batch.tokens[micro.tokens]) for micro in micros)
    trained = torch.cat([micro.tokens[micro.batch.trained] for micro in micros]) if micros else tokens
    expected = (batch.trained & torch.isin(batch.sequence, chosen)).nonzero().squeeze(1)
    assert torch.equal(trained.sort().values, expected)


@settings(max_examples=40, deadline=None)
@given(groups(), st.integers(1, 3))
def test_the_weights_of_all_micro_batches_add_up_to_one_step(made, ranks):
    batch = Batch.from_groups(made).weigh("sequence")
    total = sum(float(m.batch.weight.sum()) for rank in pack(batch, ranks, 400, "token") for m in rank)
    assert total == pytest.approx(float(bool(batch.trained.any())))


def test_a_group_is_not_cut_where_the_loss_compares_its_members():
    batch = Batch.from_groups([group(f"g{i}", [1, 2, 3], [[4] * 5, [5] * 5]) for i in range(4)])
    (whole,), (cut,) = pack(batch, 1, 15, "group", pack_tokens=8), pack(batch, 1, 15, pack_tokens=8)
    assert [micro.batch.sequences for micro in whole] == [2] * 4
    assert [micro.batch.sequences for micro in cut] == [1] * 8


def test_members_are_spread_over_micro_batches_with_their_prompt_where_a_group_is_too_large():
    batch = Batch.from_groups([group("g", [1, 2, 3], [[4] * 5] * 6)])
    (micros,) = pack(batch, 1, 14, "token")
    assert [len(m.batch) for m in micros] == [13, 13, 13]
    assert all(m.batch.tokens[:3].tolist() == [1, 2, 3] for m in micros)


def test_a_sequence_that_is_too_long_is_an_error_that_names_its_group_and_the_setting():
    batch = Batch.from_groups([group("long", [1, 2, 3], [[4] * 20, [5]])])
    with pytest.raises(DataError, match=r"'long'.*23 tokens.*learner\.max_tokens"):
        pack(batch, 1, 16, "token")


def test_the_layout_is_a_function_of_the_batch_alone():
    batch = Batch.from_groups([group(f"g{i}", [1] * (i + 1), [[4] * (7 - i), [5]]) for i in range(6)])
    first, second = (pack(batch, 2, 20, "token") for _ in range(2))
    assert [[m.tokens.tolist() for m in rank] for rank in first] == [[m.tokens.tolist() for m in r] for r in second]


def test_a_rank_without_work_gets_a_sequence_with_tokens_and_no_weight():
    batch = Batch.from_groups([group("g", [1, 2], [[3, 4], []])]).weigh("token")
    (busy,), (idle,) = pack(batch, 2, 100, "token")
    assert len(idle.batch) > 0
    assert not idle.batch.trained.any()
    assert float(idle.batch.weight.abs().sum()) == 0
    assert float(busy.batch.weight.sum()) == 1


def test_a_rank_without_work_gets_a_whole_group_where_the_loss_compares_its_members():
    batch = Batch.from_groups([group("g", [1, 2], [[3, 4], [5]])]).weigh("group")
    _, (idle,) = pack(batch, 2, 100, "group")
    assert idle.batch.sequences == 2
    assert not idle.batch.trained.any()


def test_sequences_are_packed_up_to_a_bound_below_the_largest_and_a_longer_one_is_alone():
    short = [group(f"g{i}", [1, 2, 3], [[4] * 5, [5] * 5]) for i in range(4)]
    batch = Batch.from_groups([*short, group("long", [6] * 3, [[7] * 40])])
    (micros,) = pack(batch, 1, 100, "token", pack_tokens=30)
    sizes = sorted(len(micro.batch) for micro in micros)
    assert sizes[-1] == 43
    assert len(next(micro for micro in micros if len(micro.batch) == 43).batch.group_uids) == 5
    assert next(micro for micro in micros if len(micro.batch) == 43).batch.sequences == 1
    assert max(sizes[:-1]) <= 43
    assert len(pack(batch, 1, 100)[0]) == 1
    with pytest.raises(DataError, match=r"'long'.*43 tokens.*learner\.max_tokens"):
        pack(batch, 1, 42, "token", pack_tokens=30)


def test_a_prefix_that_groups_share_is_counted_once_in_a_micro_batch():
    common = list(range(100, 120))
    batch = Batch.from_groups([group(f"g{i}", [*common, i], [[4] * 2, [5] * 2]) for i in range(6)])
    (micros,) = pack(batch, 1, 20 + 3 * 5)
    assert sorted(len(micro.batch) for micro in micros) == [35, 35]
    (micros,) = pack(batch, 1, 20 + 3 * 5 - 1)
    assert sorted(len(micro.batch) for micro in micros) == [30, 30, 30]


def test_a_shard_is_sent_as_a_list_and_does_not_see_columns_that_are_filled_after_it_was_packed():
    batch = Batch.from_groups([group(f"g{i}", [1, 2], [[3] * (i + 1), [4]]) for i in range(4)]).weigh("token")
    (shard,) = pack(batch, 1, 12)
    batch.fill("advantages", torch.ones(len(batch)))
    sent = pickle.loads(pickle.dumps(shard))
    assert type(sent) is list
    assert len(sent) == len(shard) > 1
    for there, here, bare in zip(sent, shard, shard.bare(), strict=True):
        assert torch.equal(there.tokens, here.tokens)
        assert torch.equal(there.tokens, bare.tokens)
        assert torch.equal(there.batch.weight, batch.weight[here.tokens])
        assert there.batch.filled == {"rollout_logprobs", "share", "weight"}
        assert bare.batch.filled == set()
