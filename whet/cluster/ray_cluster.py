"""Workers in Ray actors, on one machine or many: one actor for each rank, in a placement group.

Who waits for whom: the thread of the rank that comes first makes the placement group and all actors, the others wait
for it; after that each waits for its own actor. Ray is connected to in the thread of the first launch, because the
processes that it starts end with the thread that started them.
"""

import asyncio
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from whet.cluster.base import Placement, Seat, WorkerGroup
from whet.cluster.group import Call, LinkedGroup, RemoteTraceback
from whet.cluster.host import Reply
from whet.cluster.ray_actor import Home, RayHost
from whet.cluster.ray_connection import connect
from whet.cluster.rendezvous import seats
from whet.config import Config
from whet.errors import DeadlineError, WhetError, WorkerError

if TYPE_CHECKING:
    from whet.cluster.config import RayClusterConfig

log = logging.getLogger(__name__)


class RayCluster:
    """Launches workers in Ray actors."""

    def __init__(self, config: "RayClusterConfig") -> None:
        self.config = config
        self._connected = False

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        self._connected |= connect(self.config.address)
        team = _Team(self.config, worker, config, placement)
        return LinkedGroup(worker, placement, [_Actor(team, rank) for rank in range(placement.ranks)])

    async def close(self) -> None:
        """Leave the Ray cluster; one that was started here ends."""
        if self._connected:
            import ray

            self._connected = False
            await asyncio.to_thread(ray.shutdown)


class _Team:
    """The actors of one group."""

    def __init__(self, settings: "RayClusterConfig", worker: type, config: Config, placement: Placement) -> None:
        self._settings, self._worker, self._config, self._placement = settings, worker, config, placement
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._ended = False
        self._group: Any = None  # Ray's placement group
        self.members: list[tuple[Any, Home, Seat]] = []  # by rank, once they are known

    def member(self, rank: int) -> tuple[Any, Home, Seat]:
        """The actor of a rank, where it runs, and its seat. Its worker is still to be built."""
        with self._lock:
            if not self.members and self._failure is None:
                try:
                    self.members = self._start()
                except BaseException as error:
                    self._failure = WorkerError("the group was closed while it was built") if self._ended else error
            if self._failure is not None:
                raise self._failure
            return self.members[rank]

    def build(self, rank: int) -> Any:
        """A promise of the reply to building the worker of a rank."""
        import ray

        actor, home, seat = self.member(rank)
        fellows = sum(other.node == home.node for _, other, _ in self.members)
        divided = str(max(1, home.cores // fellows)) if fellows > 1 else None
        worker = ray.cloudpickle.dumps((self._worker, self._config, seat))
        return actor.start.remote(worker, os.environ.get("OMP_NUM_THREADS", divided))

    def end(self) -> None:
        """End all actors; those that are frozen take Ray a few seconds more."""
        import ray
        from ray.util.placement_group import remove_placement_group

        self._ended = True
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            for actor, _, _ in self.members:
                ray.kill(actor)
            remove_placement_group(group)

    def _start(self) -> list[tuple[Any, Home, Seat]]:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        end = time.monotonic() + self._settings.start_deadline
        each = self._resources(ray.cluster_resources())
        bundles = self._bundles(each, ray.nodes())
        self._group = group = placement_group(bundles, strategy=self._settings.strategy.upper())
        self._wait_for_room(group, each, end)
        environment = self._settings.runtime_env.get(self._worker.__name__)
        actors = [
            ray.remote(RayHost)
            .options(
                num_cpus=each["CPU"],
                num_gpus=each.get("GPU", 0),
                runtime_env=environment,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank * len(bundles) // self._placement.ranks
                ),
            )
            .remote()
            for rank in range(self._placement.ranks)
        ]
        try:
            homes = ray.get([actor.home.remote() for actor in actors], timeout=max(1.0, end - time.monotonic()))
            # Neighbours in rank share a node, and so do the ranks of a shard, which stay together.
            order = sorted(range(len(actors)), key=lambda index: homes[index].node)
            meeting = ray.get(actors[order[0]].reserve.remote(), timeout=max(1.0, end - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"the actors of {self._worker.__name__} were not up within cluster.start_deadline="
                f"{self._settings.start_deadline:g} s; see Ray's logs, or raise it where a runtime_env takes long"
            ) from None
        seated = seats(self._placement, meeting)
        return [(actors[index], homes[index], seat) for index, seat in zip(order, seated, strict=True)]

    def _resources(self, there: dict[str, float]) -> dict[str, float]:
        """What one rank takes."""
        gpus = self._settings.gpus_per_rank
        if gpus is None:
            gpus = float(there.get("GPU", 0) > 0)
        return {"CPU": self._settings.cpus_per_rank} | ({"GPU": gpus} if gpus else {})

    def _bundles(self, each: dict[str, float], nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
        """One for each shard, because a bundle is never divided between nodes; one for each rank where no node is
        large enough for that."""
        together = {name: number * self._placement.ranks_per_shard for name, number in each.items()}
        if any(all(node["Resources"].get(k, 0) >= v for k, v in together.items()) for node in nodes if node["Alive"]):
            return [together] * self._placement.shards
        return [each] * self._placement.ranks

    def _wait_for_room(self, group: Any, each: dict[str, float], end: float) -> None:
        import ray

        wanted = " and ".join(f"{number:g} {name}" for name, number in each.items())
        there = ray.cluster_resources()
        never = [name for name, number in each.items() if number * self._placement.ranks > there.get(name, 0)]
        has = " and ".join(f"{there.get(name, 0):g} {name}" for name in each)
        problem = (
            f"{self._placement.ranks} ranks of {self._worker.__name__} need {wanted} each, but the cluster has {has}"
        )
        hint = "use fewer ranks, lower cluster.cpus_per_rank or cluster.gpus_per_rank, or add nodes"
        if never and self._settings.address is None:
            raise WhetError(f"{problem}; {hint}")
        told = False
        while not group.wait(1.0):
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{problem}, and there was no room within cluster.start_deadline="
                    f"{self._settings.start_deadline:g} s; {hint}"
                )
            if not told:
                log.warning("waiting for room on the Ray cluster: %s, some of it taken", problem)
                told = True


class _Actor:
    """The link to a worker in an actor."""

    def __init__(self, team: _Team, rank: int) -> None:
        self._team, self._rank = team, rank

    @property
    def where(self) -> str:
        if not self._team.members:
            return "no actor yet"
        _, home, _ = self._team.members[self._rank]
        return f"pid {home.pid} on node {home.address}"

    def build(self) -> None:
        self._result(self._team.build(self._rank))

    def call(self, call: Call) -> Any:
        import ray

        actor, _, _ = self._team.members[self._rank]
        return self._result(actor.answer.remote(call.packed(lambda *request: ray.put(request))))

    def end(self) -> None:
        self._team.end()

    def _result(self, promise: Any) -> Any:
        import ray

        try:
            reply: Reply = ray.get(promise)
        except ray.exceptions.RayTaskError as error:  # of Ray itself, e.g. what can't be pickled
            raise RuntimeError(f"{type(error.cause).__name__}: {error.cause}") from RemoteTraceback(str(error))
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
            raise WorkerError(reason.rstrip(".").removeprefix("The actor is dead because ")) from None
        return reply.result(self._rank)
