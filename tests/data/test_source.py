"""A data set as a source: a fixed order, an exact resume, and every dropped row counted."""

import asyncio
import json

import pytest

from tests.groups import episode
from whet.base.errors import ConfigError, DataError
from whet.core.types import Group, Span, Task
from whet.data.order import TaskOrder
from whet.data.source import DatasetSource, MappedRows


def group(index):
    return Group(f"row{index}", Task(f"row{index}", []), [episode([Span([index], True)])])


def draw(source, steps, version=0):
    async def run():
        batches = []
        for step in range(steps):
            batches.append([g.uid for g in await source.next_groups()])
            await source.published(version + step + 1)
        return batches

    return asyncio.run(run())


def source_of(groups, batch_size, seed=0, shuffle=True):
    return DatasetSource(groups, batch_size, TaskOrder(len(groups), seed, shuffle))


GROUPS = [group(index) for index in range(10)]


def test_every_row_comes_once_per_epoch_and_uids_never_repeat():
    drawn = [uid for batch in draw(source_of(GROUPS, 4, seed=1), 5) for uid in batch]
    assert len(set(drawn)) == 20
    assert {uid.split("@")[0] for uid in drawn[:10]} == {g.uid for g in GROUPS}
    assert [uid.split("@")[1] for uid in drawn] == ["0"] * 10 + ["1"] * 10
    assert GROUPS[0].uid == "row0"


def test_a_resumed_source_continues_after_the_last_trained_batch():
    whole = draw(source_of(GROUPS, 3, seed=2), 9)
    source = source_of(GROUPS, 3, seed=2)
    assert draw(source, 4) == whole[:4]
    state = json.loads(json.dumps(source.state()))
    again = source_of(GROUPS, 3, seed=2)
    again.load_state(state)
    assert draw(again, 5) == whole[4:]


def test_a_batch_that_was_drawn_but_not_trained_on_is_drawn_again():
    source = source_of(GROUPS, 3, seed=2)
    draw(source, 1)
    lost = asyncio.run(source.next_groups())
    again = source_of(GROUPS, 3, seed=2)
    again.load_state(source.state())
    assert [g.uid for g in asyncio.run(again.next_groups())] == [g.uid for g in lost]


@pytest.mark.parametrize("state", [{}, {"order": TaskOrder(10).state(), "next_ticket": 4}], ids=["replayed", "sampled"])
def test_the_position_of_a_run_that_sampled_answers_is_refused(state):
    with pytest.raises(ConfigError, match="a run that sampled answers, so it has no position in the rows"):
        source_of(GROUPS, 3).load_state(state)


def test_rows_are_converted_when_drawn_and_dropped_rows_are_counted():
    mapped = []

    def to_group(index):
        mapped.append(index)
        return "too long" if index % 2 else group(index)

    source = source_of(MappedRows(range(10), to_group), 2, shuffle=False)
    assert not mapped
    assert draw(source, 2) == [["row0@0", "row2@0"], ["row4@0", "row6@0"]]
    assert mapped == list(range(7))
    assert source.dropped == {"too long": 3}
    assert source.tally()[0].result()["data/dropped"] == 3


@pytest.mark.parametrize(("rows", "usable", "batch_size"), [(10, 8, 8), (40, 4, 4), (10, 9, 4), (3, 1, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_left_out_near_an_epochs_end_never_end_a_run(rows, usable, batch_size, seed):
    some = MappedRows(range(rows), lambda i: group(i) if i < usable else "too long")
    batches = draw(source_of(some, batch_size, seed), 60)
    assert {len(batch) for batch in batches} == {batch_size}
    resumed = source_of(some, batch_size, seed)
    resumed.load_state({"order": {"epoch": 3, "cursor": rows - 1, "count": rows}})
    assert len(draw(resumed, 5)) == 5


def test_too_few_rows_are_an_error_at_the_start_or_when_found_out():
    with pytest.raises(ConfigError, match="batch of 11"):
        source_of(GROUPS, 11)
    hardly_any = source_of(MappedRows(range(10), lambda i: group(i) if i < 2 else "too long"), 3)
    with pytest.raises(DataError, match=r"only 2 of 10 rows.*too long"):
        asyncio.run(hardly_any.next_groups())
