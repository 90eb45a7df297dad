import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.metrics.statistics import majority_at_k, mcnemar, newcombe, paired_difference, pass_at_k, wilson


def test_wilson_agrees_with_published_values():
    # Newcombe 1998, table I, method 3.
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(successes, n) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_proportion_and_stays_within_0_and_1(case):
    successes, n = case
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1


def test_wilson_is_0_to_1_without_trials_and_refuses_impossible_counts():
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="not a proportion"):
        wilson(5, 4)


def test_newcombe_agrees_with_the_published_example():
    # Newcombe 1998 (interval estimation for the difference), 56/70 - 48/80, method 10.
    assert newcombe(48, 80, 56, 70) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


@pytest.mark.parametrize(("n", "correct", "k"), [(5, 0, 2), (5, 2, 1), (5, 2, 3), (6, 3, 3), (5, 5, 1), (4, 3, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, correct, k):
    subsets = list(combinations(range(n), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(min(s) < correct for s in subsets) / len(subsets))


def test_pass_at_k_does_not_overflow_and_refuses_k_above_n():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="k <= n"):
        pass_at_k(4, 1, 5)


def test_paired_difference_is_reproducible_and_narrower_than_unpaired():
    before = [float(i % 3 == 0) for i in range(120)]
    after = [1.0 if i % 12 == 1 else value for i, value in enumerate(before)]
    mean, low, high = paired_difference(before, after)
    assert (mean, low, high) == paired_difference(before, after)
    assert mean == pytest.approx(10 / 120)
    assert 0 < low < mean < high
    _, wide_low, wide_high = newcombe(sum(before), 120, sum(after), 120)
    assert high - low < wide_high - wide_low


def test_mcnemar_is_the_exact_binomial_tail():
    before = [True] * 2 + [False] * 8 + [True] * 5
    after = [False] * 2 + [True] * 8 + [True] * 5
    assert mcnemar(before, after) == pytest.approx(2 * sum(math.comb(10, i) for i in range(3)) / 2**10)
    assert mcnemar(before, before) == 1.0


def test_outcomes_of_different_tasks_are_not_paired():
    with pytest.raises(ValueError, match="same tasks"):
        paired_difference([1.0], [1.0, 0.0])


def test_the_most_frequent_answer_decides_and_equally_frequent_ones_share_the_vote() -> None:
    right = [True, False, False, False]
    assert majority_at_k(["a", "b", "b", None], right, 4) == 0.0
    assert majority_at_k(["a", "b", None, None], right, 4) == 0.5
    assert majority_at_k([None, None, None, None], [False] * 4, 4) == 0.0
    assert majority_at_k(["a", "b", "c", "d"], right, 1) == pytest.approx(0.25, abs=0.1), "a mean over 200 subsets"
    assert majority_at_k(["a"] * 3 + ["b"], [True] * 3 + [False], 3) == 1.0
    assert majority_at_k(["a", "a", "b", "c"], [True, True, False, False], 4, share=0.5) == 1.0
    assert majority_at_k(["a", "a", "b", "c"], [True, True, False, False], 4, share=0.6) == 0.0
    assert majority_at_k(["a"] * 14 + ["b"] * 11, [True] * 14 + [False] * 11, 25, share=0.56) == 1.0
    for k in (0, 5):
        with pytest.raises(ValueError, match="maj@k needs"):
            majority_at_k(["a"] * 4, right, k)
