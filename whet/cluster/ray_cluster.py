"""Workers in Ray actors, on one machine or many: one actor for each rank, in a placement group.

Who waits for whom: the thread of the rank that comes first makes the placement group and all actors, the others wait
for it; after that each waits for its own actor. Ray is connected to in the thread of the first launch, because the
processes that it starts end with the thread that started them.
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from whet.base.errors import DeadlineError, WhetError, WorkerError
from whet.cluster.base import Placement, RankInfo, WorkerGroup
from whet.cluster.group import Call, LinkedGroup, RemoteTraceback
from whet.cluster.host import Reply
from whet.cluster.ray_actor import Location, RayHost
from whet.cluster.ray_connection import connect, leave
from whet.cluster.rendezvous import rank_infos
from whet.config import Config
from whet.processes.machine import slice_for_rank

if TYPE_CHECKING:
    from whet.cluster.config import RayClusterConfig

log = logging.getLogger(__name__)

_HINT = "use fewer ranks, lower cluster.cpus_per_rank or cluster.gpus_per_rank, or add nodes"


class RayCluster:
    """Launches workers in Ray actors."""

    def __init__(self, config: "RayClusterConfig", cores: Sequence[int] | None = None, models: int = 1) -> None:
        """``cores``: those of this machine that the workers here divide. ``models``: the groups that will be
        launched."""
        self.config, self.cores = config, cores
        self._connected = False
        self._shared = Room(models) if config.models == "together" else None

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        if not self._connected:
            connect(self.config.address)
        self._connected = True
        room = self._shared or Room()
        group = ActorGroup(self.config, room, worker, config, placement, self.cores)
        return LinkedGroup(worker, placement, [_Actor(group, rank) for rank in range(placement.ranks)])

    async def close(self) -> None:
        """Leave the Ray cluster; one that was started here ends."""
        if self._connected:
            self._connected = False
            await asyncio.to_thread(leave)


class Claims:
    """What the groups of this process hold of its cluster. One that waits for another would wait forever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[object, tuple[str, dict[str, float]]] = {}

    def claim(self, holder: object, name: str, wanted: Mapping[str, float], there: Mapping[str, float]) -> str | None:
        """Set ``wanted`` (by kind of resource) aside for a holder called ``name``. Returns what is in the way where
        all that is held would be more than what is ``there``."""
        with self._lock:
            others = list(self._held.values())
            self._held[holder] = name, dict(wanted)
        needed = {kind: number + sum(held.get(kind, 0.0) for _, held in others) for kind, number in wanted.items()}
        if all(number <= there.get(kind, 0.0) + 1e-6 for kind, number in needed.items()):
            return None
        has = f"the cluster has {_listed({kind: there.get(kind, 0.0) for kind in wanted})}"
        holders = ", ".join(f"{name} hold {_listed(held)}" for name, held in others)
        return f"{has}, of which {holders}" if holders else has

    def release(self, holder: object) -> None:
        """Its resources are free, or about to be."""
        with self._lock:
            self._held.pop(holder, None)


CLAIMS = Claims()


class Room:
    """A placement group for as many groups of actors as ``share`` it. The actors of one rank then share a bundle."""

    def __init__(self, share: int = 1) -> None:
        self.share = share
        self.lock = threading.Lock()  # held while it is made
        self.group: Any = None  # Ray's
        self.bundles = 0
        self._users: set[object] = set()

    def enter(self, user: object) -> None:
        self._users.add(user)

    def leave(self, user: object) -> bool:
        """Give it back where nobody else is in it. Returns whether it was."""
        from ray.util.placement_group import remove_placement_group

        self._users.discard(user)
        if self._users:
            return False
        group, self.group = self.group, None
        if group is not None:
            remove_placement_group(group)
        return True

    def part(self, resources: Mapping[str, float]) -> dict[str, float]:
        """Return each group's part of what one rank takes, in Ray's ten-thousandths."""
        return {kind: math.floor(number / self.share * 1e4) / 1e4 for kind, number in resources.items()}


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{number:g} {kind}" for kind, number in resources.items())


class ActorGroup:
    """The actors of one group. ``host``: the class of those actors."""

    def __init__(
        self,
        settings: "RayClusterConfig",
        room: Room,
        worker: type,
        config: Config,
        placement: Placement,
        cores: Sequence[int] | None = None,
        host: type[RayHost] = RayHost,
    ) -> None:
        self._room, self._cores, self._host = room, cores, host
        self._settings, self._worker, self._config, self._placement = settings, worker, config, placement
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._ended = False
        self.actors: list[tuple[Any, Location, RankInfo]] = []  # by rank, once they are known

    def placed(self, rank: int) -> tuple[Any, Location, RankInfo]:
        """The actor of a rank, where it runs, and its rank's info. Its worker is still to be built."""
        with self._lock:
            if not self.actors and self._failure is None:
                try:
                    self.actors = self._start()
                except BaseException as error:
                    self._failure = WorkerError("the group was closed while it was built") if self._ended else error
            if self._failure is not None:
                raise self._failure
            return self.actors[rank]

    def build(self, rank: int) -> Any:
        """A promise of the reply to building the worker of a rank."""
        import ray

        actor, home, info = self.placed(rank)
        neighbours = [other for _, other, _ in self.actors if other.node == home.node]
        divided = str(max(1, home.cores // len(neighbours))) if len(neighbours) > 1 else None
        worker = ray.cloudpickle.dumps((self._worker, self._config, info))
        if self._cores is not None and home.node == ray.get_runtime_context().get_node_id():
            own = slice_for_rank(self._cores, neighbours.index(home), len(neighbours))
            return actor.start.remote(worker, str(len(own)), own)
        return actor.start.remote(worker, os.environ.get("OMP_NUM_THREADS", divided))

    def end(self) -> None:
        """End all actors; those that are frozen take Ray a few seconds more."""
        import ray

        if self._ended:
            return
        self._ended = True
        if ray.is_initialized():
            for actor, _, _ in self.actors:
                ray.kill(actor)
            if self._room.leave(self):
                CLAIMS.release(self._room)

    def _start(self) -> list[tuple[Any, Location, RankInfo]]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        end = time.monotonic() + self._settings.start_deadline
        there = ray.cluster_resources()
        whole = self._resources(there)
        each, room = self._room.part(whole), self._room
        with room.lock:
            room.enter(self)
            if room.group is None:
                self._make_room(whole, there, end)
        environment = self._settings.runtime_env.get(self._worker.__name__)
        actors = [
            ray.remote(self._host)
            .options(
                max_concurrency=self._host.concurrency,
                num_cpus=each["CPU"],
                num_gpus=each.get("GPU", 0),
                runtime_env=environment,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    room.group, placement_group_bundle_index=rank * room.bundles // self._placement.ranks
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
        infos = rank_infos(self._placement, meeting)
        return [(actors[index], homes[index], info) for index, info in zip(order, infos, strict=True)]

    def _make_room(self, each: dict[str, float], there: dict[str, float], end: float) -> None:
        import ray
        from ray.util.placement_group import placement_group

        problem = self._claim(each, there)
        bundles = self._bundles(each, ray.nodes())
        self._room.bundles = len(bundles)
        self._room.group = placement_group(bundles, strategy=self._settings.strategy.upper())
        self._wait_for_room(self._room.group, problem, end)

    def _resources(self, there: dict[str, float]) -> dict[str, float]:
        """What one rank takes."""
        gpus = self._settings.gpus_per_rank
        if gpus is None:
            gpus = float(there.get("GPU", 0) > 0)
        devices = self._placement.devices
        return {"CPU": self._settings.cpus_per_rank * devices} | ({"GPU": gpus * devices} if gpus else {})

    def _bundles(self, each: dict[str, float], nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
        """One for each shard, because a bundle is never divided between nodes; one for each rank where no node is
        large enough for that, or where groups share: within a bundle Ray fills one GPU after the other."""
        if self._room.share > 1:
            return [each] * self._placement.ranks
        together = {name: number * self._placement.ranks_per_shard for name, number in each.items()}
        if any(all(node["Resources"].get(k, 0) >= v for k, v in together.items()) for node in nodes if node["Alive"]):
            return [together] * self._placement.shards
        return [each] * self._placement.ranks

    def _claim(self, each: dict[str, float], there: dict[str, float]) -> str:
        """What to say while there is no room. Raises ``WhetError`` where there never will be."""
        ranks = self._placement.ranks
        name = f"{ranks} ranks of {self._worker.__name__}"
        in_the_way = CLAIMS.claim(self._room, name, {kind: ranks * number for kind, number in each.items()}, there)
        has = in_the_way or f"the cluster has {_listed({kind: there.get(kind, 0.0) for kind in each})}"
        problem = f"{name} need {_listed(each)} each, but {has}"
        if in_the_way and self._settings.address is None:  # one that others made may grow
            CLAIMS.release(self._room)
            raise WhetError(f"{problem}; {_HINT}")
        return problem

    def _wait_for_room(self, group: Any, problem: str, end: float) -> None:
        told = False
        while not group.wait(1.0):
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{problem}, and there was no room within cluster.start_deadline="
                    f"{self._settings.start_deadline:g} s; {_HINT}"
                )
            if not told:
                log.warning("waiting for room on the Ray cluster: %s, some of it taken", problem)
                told = True


class _Actor:
    """The link to a worker in an actor."""

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

    def call(self, call: Call) -> Any:
        import ray

        actor, _, _ = self._group.actors[self._rank]
        return self._result(actor.answer.remote(call.packed(lambda *request: ray.put(request))))

    def end(self) -> None:
        self._group.end()

    def _result(self, promise: Any) -> Any:
        import ray

        with plain_errors():
            reply: Reply = ray.get(promise)
        return reply.result(self._rank)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Ray's errors inside become ``WorkerError`` where an actor is gone, else ``RuntimeError``."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:  # of Ray itself, e.g. what can't be pickled
        raise RuntimeError(f"{type(error.cause).__name__}: {error.cause}") from RemoteTraceback(str(error))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
        raise WorkerError(reason.rstrip(".").removeprefix("The actor is dead because ")) from None
