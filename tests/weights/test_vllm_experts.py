"""Publishing a mixture of experts to a real vLLM engine, which has a special class for routers."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.tiny import tiny_qwen3_moe
from tests.vllm_engine import Loop, make
from tests.weights.collected import Listed
from whet.core.types import Distribution
from whet.engines.base import SamplingParams
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8] * 8


def test_log_probs_are_those_of_transformers_after_each_refit(loop: Loop) -> None:
    """Also of the experts, which can't be read back: vLLM's reload left them unpacked on CPUs."""
    models = [tiny_qwen3_moe(seed=seed, initializer_range=0.3, moe_intermediate_size=64) for seed in range(2)]
    generator = make(models[0])
    params = SamplingParams(40, seed=1, distribution=Distribution(0.7))

    async def go() -> None:
        try:
            for version, model in enumerate(models):
                weights = Listed(list(model.state_dict().items()))
                metrics = await EngineSync(WeightSyncConfig(), [1, 2, 3]).load(weights, generator, version)
                assert metrics.result()["refit/unread"] == 2, "gate_up_proj and down_proj of one layer"
                found = await generator.sample(PROMPT, params, f"{version}")
                tokens = torch.tensor([PROMPT + found.tokens])
                with torch.no_grad():
                    logits = model(tokens, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
                expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-3, rtol=0)
        finally:
            await generator.close()

    loop.run(go(), 500)
