"""Publishing to a real vLLM engine that computes in 8 bits: it quantizes what comes at each refit."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.tiny import tiny_qwen3
from tests.vllm_engine import Loop, Parts
from tests.weights.faults import FAULTS
from tests.weights.test_in_process import learn_something
from whet.base.errors import RefitError
from whet.engines.vllm.model import in_8_bits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NARROW = {"type": "vllm", "dtype": "bfloat16", "quantization": "fp8", "cache_gib": 0.1, "threads": 1}


@pytest.fixture(scope="module")
def parts(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    cores = {"generator_cores": 1}
    settings = {"generator": {**NARROW, "kv_dtype": "fp8"}, "cluster": {"type": "processes"}, "devices": cores}
    parts = Parts(tiny_qwen3(initializer_range=0.1), tmp_path_factory.mktemp("narrow"), **settings)
    yield parts
    parts.close(loop)


def test_every_matrix_arrives_and_is_read_back_as_it_is_rounded(parts: Parts, loop: Loop) -> None:
    async def go() -> None:
        sync = parts.sync()
        for _ in range(3):
            metrics = await parts.publish(sync)
            assert metrics["refit/unread"] == 0
            assert metrics["refit/probe_max"] > 1e-3, "it does compute in 8 bits"
            assert metrics["refit/probe_mean"] < 0.5
            await learn_something(parts.learner)

    loop.run(go())


@pytest.mark.parametrize("layer", ["model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"])
def test_a_layer_that_keeps_its_old_matrix_is_noticed(parts: Parts, loop: Loop, layer: str) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        await learn_something(parts.learner)
        await parts.generator.call(FAULTS, "keep_parameters", layer)
        with pytest.raises(RefitError, match=r"compute with different weights"):
            await parts.publish(sync)

    loop.run(go())


def test_rounding_is_vllms_own() -> None:
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    torch.manual_seed(0)
    matrix = torch.randn(7, 40).bfloat16() * torch.logspace(-6, 2, 7)[:, None].bfloat16()
    scale = fp8._fp8_channel_scale(weight_amax(matrix, dim=-1, keepdim=True))
    assert torch.equal(in_8_bits(matrix), fp8._fp8_quant_per_channel(matrix, scale).float() * scale)
