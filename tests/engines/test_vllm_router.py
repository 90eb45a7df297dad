"""Two vLLM engines behind a router: one is killed in the middle of an answer, the other frozen."""

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.tiny import tiny_llama
from tests.vllm_engine import Loop, make
from tests.weights.collected import Listed
from whet.engines.base import SamplingParams
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_an_engine_that_is_killed_and_one_that_freezes_are_replaced_and_every_answer_comes(loop: Loop) -> None:
    model = tiny_llama(initializer_range=0.3)
    router: Any = make(model, replicas=2, deadline=6.0)
    sync, weights = EngineSync(WeightSyncConfig(), [1, 2, 3]), Listed(list(model.state_dict().items()))
    started: list[int] = []

    async def strike(number: int, how: signal.Signals, version: int) -> None:
        """Strike a replica in the middle of answers; all are given, also those to come, and by ``version``."""
        processes = router.replicas[number].engine.processes.ids
        prompts = [[i, 2, 3] for i in range(8)]
        tasks = [asyncio.ensure_future(router.sample(p, SamplingParams(300), f"s{p[0]}")) for p in prompts]
        await router.sample([9, 9], SamplingParams(2), "")
        assert not any(task.done() for task in tasks)
        assert min(router.placement.outstanding) > 0
        for process in processes:
            os.kill(process, how)
        out = await asyncio.gather(*tasks)
        assert [len(c.tokens) for c in out] == [300] * 8
        assert {c.versions for c in out} == {(version, version)}
        assert router.serving == {1 - number}
        assert (await router.sample([4], SamplingParams(3), "later")).versions == (version, version)

    async def back(version: int) -> None:
        """The next refit takes the new engine in, which was started meanwhile."""
        until = time.monotonic() + 200
        while router._restarting and time.monotonic() < until:
            await asyncio.sleep(0.2)
        await sync.load(weights, router, version)
        assert router.serving == {0, 1}
        started.extend(process for replica in router.replicas for process in replica.engine.processes.ids)

    async def body() -> None:
        await back(1)
        await strike(0, signal.SIGKILL, 1)
        await back(2)
        await strike(1, signal.SIGSTOP, 2)
        await back(3)
        told = router.tally().result()
        assert (told["generator/lost"], told["generator/restarts"]) == (2, 2)

    try:
        loop.run(body(), 800)
    finally:
        loop.run(router.close())
    assert len(set(started)) >= 4
    assert not [process for process in started if psutil.pid_exists(process)]
