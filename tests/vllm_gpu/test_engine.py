"""A vLLM engine on a GPU, which the learner shares. One command: ``python -m pytest -m cuda tests/vllm_gpu``.

It has never run: no GPU was at hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'whet[vllm]'")

from tests.tiny import tiny_qwen3
from tests.vllm_engine import Loop, Parts
from tests.weights.test_in_process import learn_something
from whet.core.batch import Batch
from whet.core.types import Distribution, Episode, Group, Span, Task, Trajectory
from whet.engines.base import SamplingParams

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

PROMPT = list(range(20, 60)) * 3
ENGINE = {"type": "vllm", "dtype": "bfloat16", "devices": "0", "max_context": 1024, "cache_gib": 1.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without CUDA graphs": {"compile": False},
    "8-bit weights": {"quantization": "fp8"},
    "8-bit cache": {"kv_dtype": "fp8"},
    "guesses": {"speculative": {"type": "ngram", "tokens": 4}},
    "weights dropped asleep": {"sleep_level": 2},
    "8 bits dropped asleep, guesses": {"sleep_level": 2, "quantization": "fp8", "speculative": {"type": "ngram"}},
}


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def parts(request: pytest.FixtureRequest, loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    model = tiny_qwen3(hidden_size=256, intermediate_size=512, head_dim=64, initializer_range=0.06)
    sizes = {"generator": ENGINE | VARIANTS[request.param], "devices": {"placement": "colocated"}}
    learner = {"device": "cuda", "precision": "bfloat16"}
    parts = Parts(model, tmp_path_factory.mktemp("gpu"), **sizes, learner=learner)
    yield parts
    parts.close(loop)


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
def test_weights_arrive_and_are_computed_with(parts: Parts, loop: Loop, transport: str) -> None:
    async def go() -> None:
        sync = parts.sync(transport=transport)
        for _ in range(3):
            metrics = await parts.publish(sync)
            assert metrics["refit/unread"] == 0
            await learn_something(parts.learner)

    loop.run(go(), 600)


def test_sampled_logprobs_are_the_learners(parts: Parts, loop: Loop) -> None:
    """Also of guesses that are turned down, at a temperature and with repeated text, where there are many."""

    async def go() -> None:
        await parts.publish(parts.sync())
        distribution = Distribution(0.7)
        for seed in range(4):
            found = await parts.generator.sample(
                PROMPT, SamplingParams(200, seed, distribution=distribution), f"{seed}"
            )
            spans = [Span(PROMPT, False), Span(found.tokens, True, found.logprobs)]
            group = Group("g", Task("t", []), [Episode([Trajectory(spans)])])
            batch = Batch.from_groups([group], distribution=distribution)
            scored = (await parts.learner.score(batch, {"logprobs"}))["logprobs"][batch.trained]
            difference = (torch.tensor(found.logprobs) - scored).abs()
            assert difference.mean() < (0.3 if parts.generator.config.low_precision_setting else 0.05)

    loop.run(go(), 600)


def test_it_sleeps_wakes_for_new_weights_and_samples(parts: Parts, loop: Loop) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        free = torch.cuda.mem_get_info()[0]
        await parts.generator.sleep(new_weights=True)
        assert torch.cuda.mem_get_info()[0] - free > 0.9 * 2**30, "the cache, at least"
        await learn_something(parts.learner)
        await parts.generator.wake(new_weights=True)
        await parts.publish(sync)
        assert len((await parts.generator.sample(PROMPT, SamplingParams(5, seed=1), "s")).tokens) == 5
        if parts.generator.config.sleep_level == 1:
            await parts.generator.sleep()
            await parts.generator.wake()
            assert len((await parts.generator.sample(PROMPT, SamplingParams(5, seed=2), "s")).tokens) == 5

    loop.run(go(), 600)
