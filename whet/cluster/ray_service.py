"""An object in a Ray actor, with a separate placement group on any node with enough resources, or with devices of a
learner's ranks. Its methods are coroutines.

Who waits for whom: a call awaits its answer as long as the actor's event loop responds to pings, which are sent after
each ``deadline`` of silence. The first call waits for resources and for the actor.
"""

import asyncio
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from whet.base.errors import DeadlineError, WhetError, WorkerError
from whet.cluster.base import Placement
from whet.cluster.ray_actor import RayAsyncHost
from whet.cluster.ray_connection import connect, leave
from whet.cluster.ray_group import ActorGroup, Seat, plain_errors
from whet.cluster.ray_room import Room
from whet.config import Config

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from whet.cluster.config import RayClusterConfig

log = logging.getLogger(__name__)
_CLOSING = 30.0  # seconds for the object's close


class ActorService:
    """See ``Service``."""

    def __init__(
        self,
        settings: "RayClusterConfig",
        service: type,
        config: Config,
        devices: int,
        deadline: float,
        seat: Seat | None = None,
    ) -> None:
        self._settings, self._deadline, self._name = settings, deadline, service.__name__
        placement = Placement(devices=devices)
        self._group = ActorGroup(settings, Room(), service, config, placement, host=RayAsyncHost, seat=seat)
        self._starting = asyncio.Lock()
        self._connected = self._started = self._closed = False

    @property
    def where(self) -> str:
        if not self._group.actors:
            return "no actor yet"
        _, home, _ = self._group.actors[0]
        return f"pid {home.pid} on node {home.address}"

    async def call(self, method: str, *args: object) -> object:
        async with self._starting:
            if self._closed:
                raise WhetError(f"{self._name}.{method} was called after it was closed")
            if not self._started:
                await self._start()
        return await self._ask(method, args)

    async def _start(self) -> None:
        if not self._connected:
            connect(self._settings.address)
            self._connected = True
        with plain_errors():
            promise = await asyncio.to_thread(self._group.build, 0)
            (await _answer(promise)).result(0)
        self._started = True

    async def _ask(self, method: str, args: tuple[object, ...]) -> Any:
        import ray

        actor, _, _ = self._group.actors[0]
        promise = actor.ask.remote(method, args)
        answer = _answer(promise)
        try:
            with plain_errors():
                while not (await asyncio.wait({answer}, timeout=self._deadline))[0]:
                    await self._check_alive(actor)
                return answer.result().result(0)
        finally:
            if not answer.done():
                ray.cancel(promise)

    async def _check_alive(self, actor: "ActorHandle") -> None:
        try:
            await asyncio.wait_for(_answer(actor.home.remote()), self._deadline)
        except TimeoutError:
            raise DeadlineError(f"{self._name} ({self.where}) has not responded for {self._deadline:g} s") from None

    async def close(self) -> None:
        self._closed = True
        if not self._connected:
            return
        self._connected = False
        try:
            if self._started:
                await asyncio.wait_for(self._ask("close", ()), _CLOSING)
        except (TimeoutError, DeadlineError, WorkerError) as error:
            log.warning("%s (%s) could not be closed: %s", self._name, self.where, error)
        finally:
            await asyncio.to_thread(self._group.end)
            await asyncio.to_thread(leave)


def _answer(promise: "ObjectRef") -> asyncio.Future[Any]:
    future: Future[Any] = promise.future()
    answer = asyncio.wrap_future(future)
    # Retrieve exceptions of abandoned answers, which asyncio would report otherwise.
    answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
    return answer
