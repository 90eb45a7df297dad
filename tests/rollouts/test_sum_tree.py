"""The tree of sums against a list of the same numbers."""

import math
import random
from itertools import accumulate

import pytest

from whet.rollouts.sum_tree import SumTree


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9])
def test_each_number_is_picked_for_its_part_of_the_total(count: int) -> None:
    dice, tree, numbers = random.Random(count), SumTree(count), [0] * count
    assert tree.total == 0
    for _ in range(40):
        index = dice.randrange(count)
        numbers[index] = dice.choice([0, 0, 1, 2, 5])
        tree.put(index, float(numbers[index]))
        assert tree.total == sum(numbers)
        owners = [owner for owner, number in enumerate(numbers) for _ in range(number)]
        assert [tree.pick((place + 0.5) / len(owners)) for place in range(len(owners))] == owners


def test_a_share_between_two_numbers_picks_the_second() -> None:
    tree, numbers = SumTree(5), [1, 2, 0, 1, 4]  # with a total of 8 each share is exact
    for index, number in enumerate(numbers):
        tree.put(index, float(number))
    starts = accumulate(numbers, initial=0)
    assert [tree.pick(start / 8) for start in starts if start < 8] == [0, 1, 3, 3, 4]


def test_rounding_never_picks_a_zero() -> None:
    tree = SumTree(3)
    tree.put(0, 0.3)
    tree.put(2, 0.7)
    assert tree.pick(math.nextafter(1, 0)) == 2, "there are only three numbers"
