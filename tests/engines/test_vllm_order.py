"""The order in which a vLLM engine on a GPU is woken, refitted and resumed. No engine runs: a fake records the
calls."""

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.contracts.cluster_contract import in_event_loop
from tests.tiny import tiny_llama
from whet.base.errors import RefitError, WhetError
from whet.cluster.lease import Devices
from whet.engines.base import SamplingParams
from whet.engines.config import Deployment
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.engines.vllm.generator import VllmGenerator


class Engine:
    """As vLLM's: once all its memory is there, requests in flight continue."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.asleep: set[str] = set()

    async def sleep(self, level: int, mode: str) -> None:
        self.asleep = {"weights", "kv_cache"}
        self.events.append("sleep" if level == 1 else "forget weights")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep -= set(tags or self.asleep)
        self.events.append(f"wake {' '.join(tags or ['all'])}")
        if not self.asleep:
            self.events.append("decode")

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.events.append("pause")

    async def resume_generation(self) -> None:
        self.events.append("decode")

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.events.append("forget")
        return True

    async def update_weight_version(self, version: str) -> None:
        self.events.append(f"version {version}")


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> VllmGenerator:
    exceptions: Any = ModuleType("vllm.v1.engine.exceptions")
    exceptions.EngineDeadError = type("EngineDeadError", (Exception,), {})
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", exceptions)
    generator = VllmGenerator(
        VllmGeneratorConfig(sleep_level=2), tiny_llama().config, None, Deployment(gpus=("0",), sleeps=True)
    )
    fake: Any = Engine()
    generator.engine.running = fake
    return generator


@in_event_loop
async def test_nothing_is_decoded_under_old_weights_between_waking_and_the_refit(sleeper: VllmGenerator) -> None:
    engine: Any = sleeper.engine.running
    devices = Devices({"generation": sleeper}, shared=True)
    await sleeper.sleep()
    engine.events.clear()
    async with devices.acquire("generation", new_weights=True), sleeper.refit(1):
        engine.events.append("written")
    order = ["wake weights", "pause", "written", "forget", "version 1", "wake kv_cache", "decode"]
    assert engine.events[: len(order)] == order, "and there is room for what travels until keys and values come back"


@in_event_loop
async def test_without_a_refit_it_goes_on_where_it_left_off(sleeper: VllmGenerator) -> None:
    engine: Any = sleeper.engine.running
    await sleeper.sleep()
    await sleeper.wake()
    assert engine.events == ["pause", "sleep", "forget", "wake all", "decode", "decode"]


@in_event_loop
async def test_a_second_refit_while_awake_wakes_nothing(sleeper: VllmGenerator) -> None:
    engine: Any = sleeper.engine.running
    await sleeper.sleep()
    for version in (1, 2):
        await sleeper.wake(new_weights=True) if version == 1 else None
        engine.events.clear()
        async with sleeper.refit(version):
            pass
    assert engine.events == ["pause", "forget", "version 2", "decode"]


@in_event_loop
async def test_weights_are_dropped_only_where_new_ones_come(sleeper: VllmGenerator) -> None:
    engine: Any = sleeper.engine.running
    learner = VllmGenerator(VllmGeneratorConfig(), tiny_llama().config)  # one that holds nothing
    devices = Devices({"generation": sleeper, "learning": learner}, shared=True)
    for makes, falls in ((False, "sleep"), (True, "forget weights")):
        async with devices.acquire("generation", new_weights=True), sleeper.refit(1):
            pass
        assert sleeper.weights_complete
        engine.events.clear()
        async with devices.acquire("learning", new_weights=makes):
            assert engine.events == ["pause", falls]


@in_event_loop
async def test_without_weights_it_does_not_wake_and_requests_wait_for_them(sleeper: VllmGenerator) -> None:
    async with sleeper.refit(1):
        pass
    await sleeper.sleep(new_weights=True)
    request = asyncio.ensure_future(sleeper.sample([], SamplingParams(1), "s"))  # refused as soon as it is looked at
    with pytest.raises(RefitError, match=r"sleep_level=2 dropped them"):
        await sleeper.wake()
    assert not request.done()
    async with sleeper.refit(2):
        pass
    with pytest.raises(WhetError, match="at least one token"):
        await request
