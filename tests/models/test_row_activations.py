"""Activations of a row don't depend on the other rows, with any number of threads."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from tests.engines.test_torch_generator import DTYPES, PROMPTS, make, run, sample_all
from tests.tiny import tiny_llama
from whet.engines.base import SamplingParams
from whet.models.row_activations import fix_activations


@pytest.fixture(params=[3, 4, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"])
def test_a_row_has_the_same_activation_in_any_company(kind: str, dtype: str) -> None:
    layer = nn.ModuleList([ACT2FN[kind]])
    fix_activations(layer)
    x = torch.randn(1, 64, 4864, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    whole = layer[0](x)
    assert whole.shape == x.shape
    for count in range(16, 64, 16):
        assert torch.equal(layer[0](x[:, :count]), whole[:, :count])
        assert torch.equal(layer[0](x[:, -count:]), whole[:, -count:])


@pytest.mark.parametrize("threads", [3], indirect=True)
@pytest.mark.usefixtures("threads")
def test_a_completion_is_the_same_alone_and_in_a_crowd_with_three_threads() -> None:
    generator = make(partial(tiny_llama, intermediate_size=8192), max_batch=64)
    requests = [(PROMPTS[i % 5], SamplingParams(12, seed=i)) for i in range(60)]

    async def body() -> None:
        together = await sample_all(generator, requests)
        few = await sample_all(generator, requests[20:37])
        for other, mine in zip(few, together[20:37], strict=True):
            assert (other.tokens, other.logprobs) == (mine.tokens, mine.logprobs)

    run(generator, body)
