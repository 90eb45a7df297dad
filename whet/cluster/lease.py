"""Who holds the devices that parts of a run share. The one that held them last is put to sleep when, and only when,
another asks: what happens in a row costs nothing. Knows devices only through the sleep and wake of their tenants.

Who waits for whom: a tenant waits for the one that holds the devices to let go of them, up to the deadline.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Protocol

from whet.base.errors import DeadlineError


class Tenant(Protocol):
    """A part of a run that can make room on its devices and come back: a generator, a learner."""

    async def sleep(self, new_weights: bool = False) -> None:
        """Return when what it held on the devices is free. ``new_weights``: they will come before anything else, so
        that old ones need not be kept."""
        ...

    async def wake(self, new_weights: bool = False) -> None:
        """Return when it can work again, as it was. ``new_weights``: when it can take them, which come first."""
        ...


class Several:
    """Tenants that come and go together."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = tuple(tenants)

    async def sleep(self, new_weights: bool = False) -> None:
        for tenant in self._tenants:
            await tenant.sleep(new_weights)

    async def wake(self, new_weights: bool = False) -> None:
        for tenant in self._tenants:
            await tenant.wake(new_weights)


class Devices:
    """The devices of a run. Where they are not ``shared``, everybody has its own, nobody waits and nobody sleeps.

    >>> async with devices.lent_to("learning"):
    ...     await learner.update(batch, loss)
    """

    def __init__(self, tenants: Mapping[str, Tenant], *, shared: bool, deadline: float = 600.0) -> None:
        """All tenants are asleep, or share the devices peacefully until the first lease. ``deadline``: seconds that
        one may wait for another, and that falling asleep and waking may take."""
        self.tenants, self.shared, self.deadline = dict(tenants), shared, deadline
        self.awake: str | None = None  # whose data is on the devices
        self._using: str | None = None
        self._lock = asyncio.Lock()
        self._within = ContextVar[str | None]("within", default=None)  # the tenant whose lease the caller is inside of

    @asynccontextmanager
    async def lent_to(self, name: str, new_weights: bool = False) -> AsyncIterator[None]:
        """The devices belong to ``name`` inside, where a learner makes ``new_weights`` and a generator gets them before
        anything else. Raises ``KeyError`` for an unknown tenant, ``DeadlineError`` when the other one does not let go
        of them, fall asleep or wake in time. A lease inside of one of the same tenant costs nothing."""
        if not self.shared or self._within.get() == name:
            yield
            return
        tenant = self.tenants[name]
        try:
            async with asyncio.timeout(self.deadline):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineError(
                f"{name} did not get the devices within {self.deadline:g} s: {self._using} holds them; look for what "
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
