"""The opinions of several teachers, mixed, against loops over tokens."""

import math

import pytest
import torch

from tests.reference import mixture as slow
from whet.distillation.mixture import mixture, top_of_mixture

WEIGHTS = [2.0, 0.5, 1.5]


def tables(seed: int, rows: int = 6, words: int = 15) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(3, rows, words, generator=generator, dtype=torch.float64)).log_softmax(-1)


def test_a_mixture_is_the_log_of_the_weighted_mean_of_probabilities() -> None:
    whole = tables(0)
    found = mixture(whole, WEIGHTS)
    assert found.exp().sum(-1).tolist() == pytest.approx([1.0] * 6)
    for row in range(6):
        expected = [slow.mixture(whole[:, row, word].tolist(), WEIGHTS) for word in range(15)]
        assert found[row].tolist() == pytest.approx(expected)
    assert mixture(whole[:, :, 0], WEIGHTS).tolist() == pytest.approx(found[:, 0].tolist()), "a column [N] too"


def test_one_teacher_is_itself_to_the_bit_and_what_all_exclude_stays_excluded() -> None:
    whole = tables(1).float()
    assert torch.equal(mixture(whole[:1], [0.3]), whole[0])
    whole[:, :, 3] = -math.inf
    whole[0, :, 4] = -math.inf
    found = mixture(whole, WEIGHTS)
    assert (found[:, 3] == -math.inf).all()
    assert found[:, 4].isfinite().all()


@pytest.mark.parametrize("k", [1, 3, 15])
@pytest.mark.parametrize("seed", range(3))
def test_the_top_of_a_mixture_is_that_of_the_union_without_doubles(seed: int, k: int) -> None:
    whole = tables(seed)
    union = torch.cat([table.topk(k).indices for table in whole], dim=1)
    said = torch.stack([table.gather(1, union) for table in whole])
    ids, logprobs = top_of_mixture(union, said, WEIGHTS, k)
    for row in range(6):
        expected = slow.top_of_union([table[row].tolist() for table in whole], WEIGHTS, k)
        assert ids[row].tolist() == [token for token, _ in expected]
        assert logprobs[row].tolist() == pytest.approx([value for _, value in expected])
