"""Shared devices have one tenant at a time, and leases cost nothing unless the tenant changes."""

import asyncio

import pytest

from tests.contracts.cluster_contract import in_event_loop
from whet.base.errors import DeadlineError
from whet.cluster.lease import Devices


class Sleeper:
    """A tenant that records its calls."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        self.hangs = False
        self.fails = False

    async def sleep(self, new_weights: bool = False) -> None:
        await self._do("sleeps")

    async def wake(self, new_weights: bool = False) -> None:
        await self._do("wakes for new weights" if new_weights else "wakes")

    async def _do(self, what: str) -> None:
        if self.hangs:
            await asyncio.sleep(60)
        if self.fails:
            raise RuntimeError(f"{self.name} is broken")
        self.events.append(f"{self.name} {what}")


def two(*, shared: bool = True, deadline: float = 5.0) -> tuple[Devices, list[str], dict[str, Sleeper]]:
    events: list[str] = []
    tenants = {name: Sleeper(name, events) for name in ("generation", "learning")}
    return Devices(tenants, shared=shared, deadline=deadline), events, tenants


@in_event_loop
async def test_the_last_tenant_sleeps_before_the_next_wakes() -> None:
    devices, events, _ = two()
    for name in ("generation", "learning", "generation"):
        async with devices.acquire(name):
            events.append(f"{name} works")
    assert events == [
        "generation wakes",
        "generation works",
        "generation sleeps",
        "learning wakes",
        "learning works",
        "learning sleeps",
        "generation wakes",
        "generation works",
    ]


@in_event_loop
async def test_the_same_tenant_again_neither_sleeps_nor_wakes() -> None:
    devices, events, _ = two()
    for _ in range(3):
        async with devices.acquire("learning"):
            pass
    assert events == ["learning wakes"]


@in_event_loop
async def test_two_tenants_never_hold_shared_devices_at_once() -> None:
    devices, _, _ = two()
    inside: list[str] = []

    async def use(name: str) -> None:
        for _ in range(5):
            async with devices.acquire(name):
                inside.append(name)
                await asyncio.sleep(0)
                assert inside == [name]
                inside.clear()

    await asyncio.gather(use("generation"), use("learning"))


@in_event_loop
async def test_with_separate_devices_no_tenant_sleeps_or_waits() -> None:
    devices, events, _ = two(shared=False)
    async with devices.acquire("generation"), devices.acquire("learning"):
        pass
    assert events == []


@in_event_loop
async def test_waiting_has_a_deadline_that_names_the_holder() -> None:
    devices, _, _ = two(deadline=0.05)
    async with devices.acquire("generation"):
        with pytest.raises(DeadlineError, match=r"learning .* 0\.05 s: generation holds them"):
            async with devices.acquire("learning"):
                pytest.fail("two at once")
    async with devices.acquire("learning"):
        assert devices.awake == "learning"


@in_event_loop
async def test_a_tenant_that_does_not_fall_asleep_is_an_error_and_keeps_the_devices() -> None:
    devices, _, tenants = two(deadline=0.05)
    async with devices.acquire("generation"):
        pass
    tenants["generation"].hangs = True
    with pytest.raises(DeadlineError, match="generation did not fall asleep"):
        async with devices.acquire("learning"):
            pytest.fail("not free")
    assert devices.awake == "generation"


@in_event_loop
async def test_after_a_failure_to_wake_the_devices_are_empty_and_can_be_leased_again() -> None:
    devices, events, tenants = two()
    tenants["learning"].fails = True
    async with devices.acquire("generation"):
        pass
    with pytest.raises(RuntimeError, match="learning is broken"):
        async with devices.acquire("learning"):
            pytest.fail("it is not awake")
    assert devices.awake is None
    async with devices.acquire("generation"):
        pass
    assert events == ["generation wakes", "generation sleeps", "generation wakes"]


@in_event_loop
async def test_an_unknown_tenant_is_refused() -> None:
    devices, _, _ = two()
    with pytest.raises(KeyError):
        async with devices.acquire("cooking"):
            pytest.fail("an unknown tenant")
