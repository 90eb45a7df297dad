"""Publishing to a real vLLM engine: what arrives, what its layers compute with, and every fault that it could hide."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.tiny import tiny_qwen3
from tests.vllm_engine import Loop, Parts
from tests.weights.faults import FAULTS
from tests.weights.test_in_process import learn_something
from whet.base.errors import GeneratorError, RefitError
from whet.core.types import Distribution
from whet.engines.base import SamplingParams
from whet.engines.vllm.generator import VllmGenerator
from whet.engines.vllm.request import vllm_params

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def parts(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """The model is tied, and has norms of queries and keys."""
    model, cores = tiny_qwen3(initializer_range=0.3), {"generator_cores": 1}
    parts = Parts(model, tmp_path_factory.mktemp("tied"), cluster={"type": "processes"}, devices=cores)
    yield parts
    parts.close(loop)


@pytest.mark.parametrize("transport", ["shared_memory", "disk", "collective", "cuda_ipc"])
def test_every_matrix_arrives_and_is_read_back_whole(parts: Parts, loop: Loop, transport: str) -> None:
    async def go() -> None:
        sync = parts.sync(transport=transport)
        await parts.publish(sync)
        await learn_something(parts.learner)
        metrics = await parts.publish(sync)
        assert metrics["refit/unread"] == 0
        assert metrics["refit/probe_max"] < 1e-3
        assert parts.generator.weights_complete

    loop.run(go())


def test_a_layer_may_come_in_more_buckets_than_there_are_buffers(parts: Parts, loop: Loop) -> None:
    """The first tensors are overwritten before the last ones have arrived."""

    async def go() -> None:
        sync = parts.sync(bucket_mb=1e-6)  # each tensor alone: q, k and v of one fused layer in three of them
        await parts.publish(sync)
        await learn_something(parts.learner)
        metrics = await parts.publish(sync)
        assert metrics["refit/unread"] == 0

    loop.run(go())


def test_requests_that_come_during_a_refit_wait_for_it(parts: Parts, loop: Loop) -> None:
    async def go() -> None:
        sync = parts.sync(bucket_mb=1e-6)
        await parts.publish(sync)
        refit = asyncio.ensure_future(parts.publish(sync))
        while parts.generator.weights_complete:
            await asyncio.sleep(0.001)
        found = await parts.generator.sample([5, 6, 7], SamplingParams(2, seed=1), "s")
        await refit
        assert found.versions == (parts.version, parts.version)

    loop.run(go())


def test_a_refit_that_broke_off_in_a_layer_is_made_good_by_the_next(
    parts: Parts, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        sync = parts.sync(bucket_mb=1e-6)  # each tensor alone: q of a fused layer comes, k does not
        honest, taken = parts.generator.call, []

        async def breaking(target: str, method: str, *args: Any) -> list[Any]:
            taken.append(method)
            if taken.count("take") == 3:
                raise GeneratorError("the wire was cut")
            return await honest(target, method, *args)

        with monkeypatch.context() as cut:
            cut.setattr(parts.generator, "call", breaking)
            with pytest.raises(GeneratorError, match="the wire was cut"):
                await parts.publish(sync)
        with pytest.raises(RefitError, match="no complete set"):
            await parts.generator.sample([5, 6, 7], SamplingParams(2, seed=1), "s")
        await parts.publish(sync)
        assert parts.generator.weights_complete

    loop.run(go())


def test_requests_under_way_go_on_with_new_weights(parts: Parts, loop: Loop) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        long = asyncio.ensure_future(parts.generator.sample([5, 6, 7], SamplingParams(200, seed=1), "s"))
        await parts.generator.sample([5, 6, 7], SamplingParams(2, seed=2), "t")
        await parts.publish(sync)
        assert (await long).versions == (parts.version - 1, parts.version)

    loop.run(go())


def test_an_engine_that_sleeps_samples_nothing_and_goes_on_as_it_was(parts: Parts, loop: Loop) -> None:
    async def go() -> None:
        generator = parts.generator
        await parts.publish(parts.sync())
        params = SamplingParams(100, greedy=True)
        expected = (await generator.sample([5, 6, 7], params, "s")).tokens
        under_way = asyncio.ensure_future(generator.sample([5, 6, 7], params, "s"))
        await generator.sample([8, 9], SamplingParams(2), "t")
        await generator.sleep()
        late = asyncio.ensure_future(generator.sample([5, 6, 7], params, "u"))
        _, waiting = await asyncio.wait({under_way, late}, timeout=2.0)
        assert late in waiting
        await generator.wake()
        assert (await under_way).tokens == (await late).tokens == expected
        assert (await late).versions == (parts.version, parts.version)

    loop.run(go())


def test_the_engine_runs_on_the_cores_that_it_was_given(parts: Parts, loop: Loop) -> None:
    import psutil

    assert parts.generator.deployment.cores == [max(os.sched_getaffinity(0))]
    loop.run(parts.publish(parts.sync()))
    for process in parts.generator.engine.processes.ids:
        for thread in psutil.Process(process).threads():
            assert os.sched_getaffinity(thread.id) == set(parts.generator.deployment.cores)
    assert len(os.sched_getaffinity(0)) >= 2


@pytest.mark.parametrize("layer", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.qkv_proj", "lm_head"])
def test_a_layer_that_computes_with_old_weights_is_named(parts: Parts, loop: Loop, layer: str) -> None:
    """On CPUs the layers keep repacked weights, which no digest of parameters can see. A tied head has its own copy."""

    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        await learn_something(parts.learner)
        await parts.generator.call(FAULTS, "keep", layer)
        expected = layer.replace("qkv_proj", "q_proj").replace(".", r"\.")
        with pytest.raises(RefitError, match=rf"compute with different weights.*{expected}"):
            await parts.publish(sync)

    loop.run(go())


def test_a_prefix_cache_that_was_kept_is_noticed(parts: Parts, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any, engine: Any) -> None:
        pass

    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        monkeypatch.setattr(VllmGenerator, "_forget", nothing)
        with pytest.raises(RefitError, match=r"served 128 tokens .* prefix cache was not reset"):
            await parts.publish(sync)

    loop.run(go())


def test_an_engine_at_another_temperature_is_noticed(parts: Parts, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        plain = Distribution()
        monkeypatch.setattr(
            "whet.engines.vllm.generator.vllm_params",
            lambda params, limit: vllm_params(replace(params, distribution=plain), limit),
        )
        with pytest.raises(RefitError, match="decode path"):
            await parts.publish(sync)

    loop.run(go())


def test_a_bucket_that_is_lost_is_named(parts: Parts, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        honest = parts.generator.call

        async def forgetful(target: str, method: str, *args: Any) -> list[Any]:
            return [None] if method == "take" and args[0] == 3 else await honest(target, method, *args)

        monkeypatch.setattr(parts.generator, "call", forgetful)
        with pytest.raises(RefitError, match=r"did not receive .* missing or differ, the first \S+weight"):
            await parts.publish(sync)
        monkeypatch.undo()
        await parts.publish(sync)  # a complete set makes it good again

    loop.run(go())
