"""The Ray actors of one group, one for each rank: in a placement group, or on the devices of ranks of another group.

Who waits for whom: the first rank's thread creates the placement group and all actors while the other threads wait. An
actor with the devices of other ranks waits until these have started.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whet.base.errors import DeadlineError, WhetError, WorkerError
from whet.cluster.base import Placement, RankInfo
from whet.cluster.call import RemoteTraceback
from whet.cluster.ray_actor import Location, RayHost
from whet.cluster.ray_room import CLAIMS, Room, listed
from whet.cluster.rendezvous import rank_infos
from whet.config import Config
from whet.processes.machine import slice_for_rank

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

    from whet.cluster.config import RayClusterConfig

log = logging.getLogger(__name__)

_HINT = "use fewer ranks, lower cluster.cpus_per_rank or cluster.gpus_per_rank, or add nodes"


@dataclass(slots=True, frozen=True)
class Seat:
    """The devices of some ranks of the first of ``groups``, once it is launched."""

    groups: "Sequence[ActorGroup]"
    ranks: range

    def homes(self) -> list[Location]:
        """Return the locations of the ranks, which are on one node, when they have started."""
        if not self.groups:
            raise WhetError("an engine that shares the learner's devices can't start before the learner is launched")
        homes = [self.groups[0].placed(rank)[1] for rank in self.ranks]
        if len({home.node for home in homes}) > 1:
            on = ", ".join(f"{rank} on {home.address}" for rank, home in zip(self.ranks, homes, strict=True))
            raise WhetError(
                f"an engine of {len(homes)} ranks computes on one node, but the learner's ranks whose devices it would "
                f"share are on several: {on}; lower the ranks of an engine to a divisor of the learner's on each node"
            )
        return homes


class ActorGroup:
    """The actors of one group. ``host``: the actor class. ``seat``: one actor has these devices, and reserves none."""

    def __init__(
        self,
        settings: "RayClusterConfig",
        room: Room,
        worker: type,
        config: Config,
        placement: Placement,
        cores: Sequence[int] | None = None,
        host: type[RayHost] = RayHost,
        seat: Seat | None = None,
    ) -> None:
        self._room, self._cores, self._host, self._seat = room, cores, host, seat
        self._settings, self._worker, self._config, self._placement = settings, worker, config, placement
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._ended = False
        self.actors: list[tuple[Any, Location, RankInfo]] = []  # by rank, once started

    def placed(self, rank: int) -> "tuple[ActorHandle, Location, RankInfo]":
        """Return the actor of a rank, its location, and its rank info. Its worker is not built yet."""
        with self._lock:
            if not self.actors and self._failure is None:
                try:
                    self.actors = self._start()
                except BaseException as error:
                    self._failure = WorkerError("the group was closed while it was built") if self._ended else error
            if self._failure is not None:
                raise self._failure
            return self.actors[rank]

    def build(self, rank: int) -> object:
        """Start building the worker of a rank; return Ray's reference to the reply."""
        import ray

        actor, home, info = self.placed(rank)
        worker = ray.cloudpickle.dumps((self._worker, self._config, info))
        if self._seat is not None:
            gpus = [gpu for shared in self._seat.homes() for gpu in shared.gpus]
            return actor.start.remote(worker, os.environ.get("OMP_NUM_THREADS"), gpus=gpus)
        neighbours = [other for _, other, _ in self.actors if other.node == home.node]
        divided = str(max(1, home.cores // len(neighbours))) if len(neighbours) > 1 else None
        if self._cores is not None and home.node == ray.get_runtime_context().get_node_id():
            cores = slice_for_rank(self._cores, neighbours.index(home), len(neighbours))
            return actor.start.remote(worker, str(len(cores)), cores)
        return actor.start.remote(worker, os.environ.get("OMP_NUM_THREADS", divided))

    def end(self) -> None:
        """End all actors; for frozen ones Ray takes a few seconds longer."""
        import ray

        if self._ended:
            return
        self._ended = True
        if ray.is_initialized():
            for actor, _, _ in self.actors:
                ray.kill(actor)
            if self._room.leave(self):
                CLAIMS.release(self._room)

    def _start(self) -> "list[tuple[ActorHandle, Location, RankInfo]]":
        import ray

        end = time.monotonic() + self._settings.start_deadline
        actors = self._actors(end)
        try:
            homes = ray.get([actor.home.remote() for actor in actors], timeout=max(1.0, end - time.monotonic()))
            # Contiguous ranks share a node, so the ranks of one model replica stay together.
            placed = sorted(zip(actors, homes, strict=True), key=lambda pair: pair[1].node)
            first, _ = placed[0]
            meeting = ray.get(first.reserve.remote(), timeout=max(1.0, end - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"the actors of {self._worker.__name__} did not start within cluster.start_deadline="
                f"{self._settings.start_deadline:g} s; see Ray's logs, or raise it if a runtime_env takes long"
            ) from None
        infos = rank_infos(self._placement, meeting)
        return [(*pair, info) for pair, info in zip(placed, infos, strict=True)]

    def _actors(self, end: float) -> "list[ActorHandle]":
        """Create the actors in their places; they start in their time."""
        import ray

        places = self._in_room(end) if self._seat is None else self._in_seat(self._seat)
        environment = self._settings.runtime_env.get(self._worker.__name__)
        host = ray.remote(self._host)
        return [
            host.options(max_concurrency=self._host.concurrency, runtime_env=environment, **place).remote()
            for place in places
        ]

    def _in_room(self, end: float) -> list[dict[str, Any]]:
        """Return Ray's options for each rank's actor in the placement group, which is made if it isn't there."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        total = ray.cluster_resources()
        whole = self._resources(total)
        each, room = self._room.part(whole), self._room
        with room.lock:
            room.enter(self)
            if room.group is None:
                self._make_room(whole, total, end)
        bundles = [rank * room.bundles // self._placement.ranks for rank in range(self._placement.ranks)]
        return [
            {
                "num_cpus": each["CPU"],
                "num_gpus": each.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    room.group, placement_group_bundle_index=bundle
                ),
            }
            for bundle in bundles
        ]

    def _in_seat(self, seat: Seat) -> list[dict[str, Any]]:
        """Return Ray's options for one actor on the node of a seat."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = seat.homes()[0].node
        return [{"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}]

    def _make_room(self, each: dict[str, float], total: dict[str, float], end: float) -> None:
        import ray
        from ray.util.placement_group import placement_group

        problem = self._claim(each, total)
        bundles = self._bundles(each, ray.nodes())
        self._room.bundles = len(bundles)
        self._room.group = placement_group(bundles, strategy=self._settings.strategy.upper())
        self._wait_for_room(self._room.group, problem, end)

    def _resources(self, total: dict[str, float]) -> dict[str, float]:
        """Return the resources of one rank."""
        gpus = self._settings.gpus_per_rank
        if gpus is None:
            gpus = float(total.get("GPU", 0) > 0)
        devices = self._placement.devices
        return {"CPU": self._settings.cpus_per_rank * devices} | ({"GPU": gpus * devices} if gpus else {})

    def _bundles(self, each: dict[str, float], nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Return one bundle per model replica, because a bundle is never split over nodes; one per rank if no node is
        large enough, or if groups share the bundles: within a bundle Ray fills one GPU after the other."""
        if self._room.share > 1:
            return [each] * self._placement.ranks
        together = {name: number * self._placement.ranks_per_shard for name, number in each.items()}
        if any(all(node["Resources"].get(k, 0) >= v for k, v in together.items()) for node in nodes if node["Alive"]):
            return [together] * self._placement.shards
        return [each] * self._placement.ranks

    def _claim(self, each: dict[str, float], total: dict[str, float]) -> str:
        """Return the message for waiting. Raises ``WhetError`` if the resources can never become free."""
        ranks = self._placement.ranks
        name = f"{ranks} ranks of {self._worker.__name__}"
        conflict = CLAIMS.claim(self._room, name, {kind: ranks * number for kind, number in each.items()}, total)
        has = conflict or f"the cluster has {listed({kind: total.get(kind, 0.0) for kind in each})}"
        problem = f"{name} need {listed(each)} each, but {has}"
        if conflict and self._settings.address is None:  # a cluster that was joined may grow
            CLAIMS.release(self._room)
            raise WhetError(f"{problem}; {_HINT}")
        return problem

    def _wait_for_room(self, group: "PlacementGroup", problem: str, end: float) -> None:
        warned = False
        while not group.wait(1.0):
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{problem}, and these were not free within cluster.start_deadline="
                    f"{self._settings.start_deadline:g} s; {_HINT}"
                )
            if not warned:
                log.warning("waiting for resources of the Ray cluster: %s, some of them in use", problem)
                warned = True


@contextmanager
def plain_errors() -> Iterator[None]:
    """Convert Ray's errors: ``WorkerError`` if an actor died, else ``RuntimeError``."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:  # from Ray itself, e.g. an argument that can't be pickled
        raise RuntimeError(f"{type(error.cause).__name__}: {error.cause}") from RemoteTraceback(str(error))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
        raise WorkerError(reason.rstrip(".").removeprefix("The actor is dead because ")) from None
