"""The description of a difference between ranks and a single process."""

from pathlib import Path

import pytest
import torch

from tests.parallel.comparing import check, deviations

NUMBERS = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([1.0, 2.0])}


def test_a_difference_names_the_tensor_how_far_it_is_off_and_the_bound() -> None:
    off = NUMBERS | {"b": torch.tensor([1.25, 2.5])}
    assert list(deviations("gradient", NUMBERS, off, 0.125)) == []
    assert list(deviations("gradient", NUMBERS, off, 0.1)) == [
        "gradient b differs by 1.2e-01 of the largest number, more than 1.0e-01"
    ]
    (only,) = deviations("gradient", NUMBERS, NUMBERS | {"a": torch.tensor([1.0, float("nan")])}, 0.1)
    assert only.startswith("gradient a differs by nan")


def test_an_assertion_of_the_comparison_says_what_differs() -> None:
    with pytest.raises(AssertionError, match=r"(?s)'a'.*'c'"):
        list(deviations("gradient", NUMBERS, {"b": NUMBERS["b"], "c": NUMBERS["a"]}, 0.1))


@pytest.mark.slow
def test_a_check_reports_all_differences_with_the_name_of_their_case(models: dict[str, Path]) -> None:
    """Two micro-batches and one add the same numbers in another order, which no bound of 0 allows."""
    with pytest.raises(AssertionError, match=r"plain: gradient \S+ differs by \S+ of the largest number, more than 0"):
        check(models, {"plain": ("llama", {}, {})}, tolerance=0.0)
