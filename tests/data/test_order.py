"""Every index is drawn once per epoch, in an order that only seed and epoch determine, resumable at any point."""

import json
import random
import tracemalloc

import pytest

from whet.base.errors import ConfigError
from whet.base.seeds import derive_seed
from whet.data.order import TaskOrder


def draw(order, count):
    return [order.next() for _ in range(count)]


def test_each_epoch_draws_every_index_once_in_another_order():
    order = TaskOrder(20, seed=3)
    epochs = [draw(order, 20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order.epoch == 2
    assert draw(TaskOrder(20, seed=3), 60) == [index for epoch in epochs for index in epoch]
    assert draw(TaskOrder(20, seed=4), 20) != epochs[0]
    assert draw(TaskOrder(3, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_is_that_of_a_shuffled_list_in_a_tenth_of_its_memory():
    count = 100_000
    shuffled = list(range(count))
    random.Random(derive_seed(3, "order", 0)).shuffle(shuffled)
    tracemalloc.start()
    order = TaskOrder(count, seed=3)
    first = order.next()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 5 * count
    assert [first, *draw(order, count - 1)] == shuffled


@pytest.mark.parametrize("drawn", [0, 1, 6, 7, 8, 20])
def test_it_resumes_where_it_was_saved(drawn):
    order = TaskOrder(7, seed=1)
    draw(order, drawn)
    state = json.loads(json.dumps(order.state()))
    again = TaskOrder(7, seed=1)
    again.load_state(state)
    assert draw(again, 15) == draw(order, 15)


def test_other_data_or_an_impossible_position_are_errors():
    with pytest.raises(ConfigError, match="empty"):
        TaskOrder(0)
    state = TaskOrder(5).state()
    with pytest.raises(ConfigError, match="5 tasks or rows, now there are 6"):
        TaskOrder(6).load_state(state)
    with pytest.raises(ConfigError, match="impossible"):
        TaskOrder(5).load_state({**state, "cursor": 9})
