"""Leases of the devices that parts of a run share. The last tenant is put to sleep only when another one needs the
devices, so consecutive leases of one tenant cost nothing. Controls devices only through their tenants' sleep and wake.

Who waits for whom: a tenant waits, up to the deadline, until the current holder releases the devices.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Protocol

from whet.base.errors import DeadlineError


class Tenant(Protocol):
    """A part of a run that can free its devices and take them again: a generator, a learner."""

    async def sleep(self, new_weights: bool = False) -> None:
        """Free the memory on the devices. ``new_weights``: new weights will come before any other call, so the old ones
        need not be kept."""
        ...

    async def wake(self, new_weights: bool = False) -> None:
        """Return when it can work again. ``new_weights``: when it can receive new weights, which come first."""
        ...


class TenantGroup:
    """Tenants that sleep and wake together."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = tuple(tenants)

    async def sleep(self, new_weights: bool = False) -> None:
        for tenant in self._tenants:
            await tenant.sleep(new_weights)

    async def wake(self, new_weights: bool = False) -> None:
        for tenant in self._tenants:
            await tenant.wake(new_weights)


class Devices:
    """The devices of a run. If they are not ``shared``, each tenant has separate devices and leases do nothing.

    >>> async with devices.acquire("learning"):
    ...     await learner.update(batch, loss)
    """

    def __init__(self, tenants: Mapping[str, Tenant], *, shared: bool, deadline: float = 600.0) -> None:
        """Until the first lease all tenants are asleep, or fit on the devices together. ``deadline``: seconds that one
        tenant may wait for another, and for falling asleep and waking."""
        self.tenants, self.shared, self.deadline = dict(tenants), shared, deadline
        self.awake: str | None = None  # the tenant whose data is on the devices
        self._using: str | None = None
        self._lock = asyncio.Lock()
        self._within = ContextVar[str | None]("within", default=None)  # the tenant whose lease encloses the caller

    @asynccontextmanager
    async def acquire(self, name: str, new_weights: bool = False) -> AsyncIterator[None]:
        """Lease the devices to ``name`` inside the block. ``new_weights``: inside, a learner makes new weights, or a
        generator receives them before any other call. Raises ``KeyError`` for an unknown tenant, ``DeadlineError`` if
        the other tenant does not release the devices, fall asleep or wake in time. Nested leases of one tenant are
        free."""
        if not self.shared or self._within.get() == name:
            yield
            return
        tenant = self.tenants[name]
        try:
            async with asyncio.timeout(self.deadline):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineError(
                f"{name} did not get the devices within {self.deadline:g} s: {self._using} holds them; find out what "
                "hangs there"
            ) from None
        try:
            self._using = name
            await self._wake(name, tenant, new_weights)
            inside = self._within.set(name)
            try:
                yield
            finally:
                self._within.reset(inside)
        finally:
            self._using = None
            self._lock.release()

    async def _wake(self, name: str, tenant: Tenant, new_weights: bool) -> None:
        if self.awake == name:
            return
        if self.awake is not None:
            before = self.awake
            await self._in_time(self.tenants[before].sleep(new_weights), f"{before} did not fall asleep")
            self.awake = None
        await self._in_time(tenant.wake(new_weights), f"{name} did not wake")
        self.awake = name

    async def _in_time(self, waiting: Awaitable[None], problem: str) -> None:
        try:
            async with asyncio.timeout(self.deadline):
                await waiting
        except TimeoutError:
            raise DeadlineError(f"{problem} within {self.deadline:g} s, so the devices are not free") from None
