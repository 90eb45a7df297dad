"""Products of a row don't depend on the other rows, whatever the machine's kernels do."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.engines.test_torch_generator import DTYPES, PROMPTS, make, run, sample_all
from tests.grids import grid
from tests.tiny import tiny_llama
from whet.engines.base import SamplingParams
from whet.models.packed_linear import pack_linears
from whet.models.row_sizes import SIZES, FixedRows, fix_rows

WEIGHT = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sizes", [SIZES, (64,), (16, 64)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 64, 65, 200, 256, 257, 600])
def test_only_the_given_numbers_of_rows_are_computed(sizes: tuple[int, ...], rows: int) -> None:
    computed: list[int] = []

    def product(x: Tensor) -> Tensor:
        computed.append(len(x))
        return x @ WEIGHT.T + len(x) * 0

    x = torch.randn(1, rows, 3, generator=torch.Generator().manual_seed(rows))
    y = FixedRows(product, sizes)(x)
    assert y.shape == (1, rows, 5)
    torch.testing.assert_close(y, x @ WEIGHT.T)
    assert set(computed) <= ({*sizes} if rows else {0})
    assert sum(computed) < rows + sizes[-1]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


SHAPES = [(576, 576), (576, 192), (1536, 576), (128, 64), (320, 256), (64, 264), (7, 5)]


@pytest.mark.parametrize(("shape", "dtype", "pack"), grid(SHAPES, list(DTYPES), [True, False]), ids=str)
@torch.no_grad()
def test_a_row_has_the_same_product_in_any_company(shape: tuple[int, int], dtype: str, pack: bool) -> None:
    layer = nn.Linear(*shape, dtype=DTYPES[dtype])
    if pack:
        pack_linears(layer)
    check_company(layer)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("shape", "bias", "transposed"), grid(SHAPES, [True, False], [True, False]), ids=str)
@torch.no_grad()
def test_the_same_with_two_threads_and_weights_as_experts_have_them(
    shape: tuple[int, int], bias: bool, transposed: bool
) -> None:
    layer = nn.Linear(*shape, bias)
    if transposed:
        layer.weight = nn.Parameter(layer.weight.T.contiguous().T)
    check_company(layer)


def check_company(layer: nn.Linear) -> None:
    fix_rows(layer)
    x = torch.randn(1, 512, layer.in_features, generator=torch.Generator().manual_seed(1)).to(layer.weight.dtype)
    whole = layer(x)
    for count in (1, 2, 15, *range(16, 512, 16), 511):
        assert torch.equal(layer(x[:, :count]), whole[:, :count])
        assert torch.equal(layer(x[:, -count:]), whole[:, -count:])
    shuffled = torch.randperm(512)
    assert torch.equal(layer(x[:, shuffled]), whole[:, shuffled])


@pytest.mark.parametrize(("dtype", "packed"), grid(["float32", "bfloat16"], [True, False]))
def test_a_completion_of_a_model_of_real_width_is_the_same_alone_and_in_a_crowd(dtype: str, packed: bool) -> None:
    def wide(**named: object) -> nn.Module:
        sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
        return tiny_llama(**sizes, **named)

    generator = make(wide, dtype, max_batch=64, packed_weights=packed)
    requests = [(PROMPTS[i % 5], SamplingParams(12, seed=i)) for i in range(60)]

    async def body() -> None:
        together = await sample_all(generator, requests)
        few = await sample_all(generator, requests[20:37])
        alone = await generator.sample(*requests[31], "s")
        for other, mine in [*zip(few, together[20:37], strict=True), (alone, together[31])]:
            assert (other.tokens, other.logprobs) == (mine.tokens, mine.logprobs)

    run(generator, body)
