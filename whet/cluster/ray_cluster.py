"""Workers in Ray actors, on one machine or many: one actor per rank (see ``whet.cluster.ray_group``).

Who waits for whom: each rank's thread waits for its actor. The thread of the first launch connects to Ray, because the
processes that Ray starts end with the thread that started them.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whet.cluster.base import Cluster, Placement, Service, WorkerGroup
from whet.cluster.call import Call
from whet.cluster.group import LinkedGroup
from whet.cluster.host import Reply
from whet.cluster.ray_connection import connect, leave
from whet.cluster.ray_group import ActorGroup, Seat, plain_errors
from whet.cluster.ray_room import Room
from whet.cluster.ray_service import ActorService
from whet.config import Config

if TYPE_CHECKING:
    from ray import ObjectRef

    from whet.cluster.config import RayClusterConfig


class RayCluster(Cluster):
    """Launches workers in Ray actors."""

    def __init__(self, config: "RayClusterConfig", cores: Sequence[int] | None = None, models: int = 1) -> None:
        """``cores``: divided among the workers on this machine. ``models``: number of groups that will be launched."""
        self.config, self.cores = config, cores
        self._connected = False
        self._shared = Room(models) if config.models == "together" else None
        self._groups: list[ActorGroup] = []

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        if not self._connected:
            connect(self.config.address)
        self._connected = True
        room = self._shared or Room()
        group = ActorGroup(self.config, room, worker, config, placement, self.cores)
        self._groups.append(group)
        return LinkedGroup(worker, placement, [_Actor(group, rank) for rank in range(placement.ranks)])

    def serve(self, service: type, config: Config, devices: int, deadline: float, shares: int | None = None) -> Service:
        seat = None if shares is None else Seat(self._groups, range(shares, shares + devices))
        return ActorService(self.config, service, config, devices, deadline, seat)

    async def close(self) -> None:
        """Disconnect from the Ray cluster; a cluster that was started here ends."""
        if self._connected:
            self._connected = False
            await asyncio.to_thread(leave)


class _Actor:
    """A link to a worker in an actor."""

    thread = None

    def __init__(self, group: ActorGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    @property
    def where(self) -> str:
        if not self._group.actors:
            return "no actor yet"
        _, home, _ = self._group.actors[self._rank]
        return f"pid {home.pid} on node {home.address}"

    def build(self) -> None:
        self._result(self._group.build(self._rank))

    def call(self, call: Call) -> object:
        import ray

        actor, _, _ = self._group.actors[self._rank]
        with call.packed(lambda *request: ray.put(request)) as request:
            promise = actor.answer.remote(request)
        del request  # Ray frees it once all ranks have it
        return self._result(promise)

    def end(self) -> None:
        self._group.end()

    def _result(self, promise: "ObjectRef") -> object:
        import ray

        with plain_errors():
            reply: Reply = ray.get(promise)
        return reply.result(self._rank)
