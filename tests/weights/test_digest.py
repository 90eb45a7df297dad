"""Any difference between two sets of weights changes the digest, and nothing else does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu_time import cpu_seconds_below
from whet.weights.digest import _lanes, _row_sums, _weights, differing, digest, same_bits, tensor_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40_000),
    at=st.integers(0, 2**32),
    bit=st.integers(0, 63),
    dtype=st.sampled_from(DTYPES[:-1]),
)
def test_one_changed_bit_anywhere_changes_the_digest(size: int, at: int, bit: int, dtype: torch.dtype) -> None:
    tensor = (100 * noise(size)).to(dtype)
    before = tensor_digest(tensor)
    raw = tensor.view(torch.uint8)
    raw[(at % size) * dtype.itemsize + bit // 8 % dtype.itemsize] ^= 1 << (bit % 8)
    assert tensor_digest(tensor) != before


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 19_999), second=st.integers(0, 19_999), negate=st.booleans())
def test_two_swapped_elements_change_the_digest(first: int, second: int, negate: bool) -> None:
    tensor = noise(20_000)
    if negate:  # two numbers that differ in their highest bit alone
        tensor[second] = -tensor[first]
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert (tensor_digest(swapped) == tensor_digest(tensor)) == torch.equal(tensor, swapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_permutation_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = noise(64, 64).to(dtype)
    rows, columns = tensor.clone(), tensor.clone()
    rows[[3, 40]] = tensor[[40, 3]]
    columns[:, [3, 40]] = tensor[:, [40, 3]]
    large = noise(8, 8192).to(dtype)  # a row is a whole number of the digest's own rows
    both = {tensor_digest(t) for t in (large, large[[1, 0, 2, 3, 4, 5, 6, 7]], large.flip(0), large.flip(1))}
    assert len({tensor_digest(t) for t in (tensor, rows, columns, tensor.T, tensor.flip(0))}) == 5
    assert len(both) == 4


def test_the_same_bits_of_another_shape_or_type_differ() -> None:
    tensor = torch.zeros(24)
    others = [
        tensor,
        tensor.view(4, 6),
        tensor.view(6, 4),
        torch.zeros(25),
        tensor.view(torch.int32),
        tensor.bfloat16(),
    ]
    others += [torch.zeros(()), torch.zeros(0), torch.zeros(0, 2), torch.zeros(1), -tensor]
    assert len({tensor_digest(t) for t in others}) == len(others)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_in_memory_does_not_matter(dtype: torch.dtype) -> None:
    tensor = (100 * noise(70, 90)).to(dtype)
    stored = torch.empty(6301, dtype=dtype)  # so that the view begins at an odd address
    view = stored[1:].view(70, 90)
    view.copy_(tensor)
    assert tensor_digest(tensor) == tensor_digest(view) == tensor_digest(tensor.T.contiguous().T)


def test_a_rows_sum_is_that_of_lane_times_weight_modulo_two_to_the_64() -> None:
    weights = _weights().tolist()
    for lanes in _lanes((1e30 * noise(300_000)).view(torch.uint8)):
        sums = [sum(lane * weight for lane, weight in zip(row, weights, strict=True)) for row in lanes.tolist()]
        assert [one % 2**64 for one in _row_sums(lanes).tolist()] == [one % 2**64 for one in sums]


def test_no_change_of_one_lane_and_no_swap_of_two_in_a_row_can_cancel() -> None:
    weights = _weights()
    assert bool((weights % 2 == 1).all())
    assert len(torch.unique(weights & (2**33 - 1))) == len(weights)


def test_digests_are_the_same_in_every_process() -> None:
    assert tensor_digest(torch.arange(10_000)) == 9990815040994688264


def test_differing_names_what_changed_and_what_one_side_lacks() -> None:
    held = {"a": noise(50), "b": noise(60), "c": noise(70)}
    sent = {**{name: tensor.clone() for name, tensor in held.items()}, "d": noise(5)}
    sent["b"][7] += 1
    del sent["c"]
    assert differing(digest(held.items()), digest(held.items())) == []
    assert differing(digest(sent.items()), digest(held.items())) == ["b", "d", "c"]


def test_a_model_of_135_million_parameters_takes_a_fraction_of_a_second() -> None:
    weights = [(f"layer{i}", noise(1_000_000, seed=i).bfloat16().repeat(9)) for i in range(15)]
    with cpu_seconds_below(2.0):  # 0.1 on a free core
        digest(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_the_same_bits_are_the_same_type_shape_and_bits(dtype: torch.dtype) -> None:
    one = torch.tensor([[0.0, 1.0], [0.0, float("nan")]]).to(dtype)
    assert same_bits(one, one.clone())
    assert same_bits(one.T, one.clone().T)
    assert not same_bits(one, one.T)
    assert not same_bits(one, one.reshape(1, 4))
    assert not same_bits(one, one.to(torch.float16))
    if dtype.is_floating_point:
        other = one.clone()
        other[0, 0] = -0.0
        assert not same_bits(one, other)
