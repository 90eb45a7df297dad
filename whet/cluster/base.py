"""The interfaces of clusters: a cluster launches a worker class on some ranks; a worker group calls its methods.

Independent of models and algorithms: only method names, arguments and results are sent. A worker is any class that is
constructed as ``worker(config, info)`` and whose methods are plain functions (not coroutines); a ``close`` method, if
it has one, is called at the end. The contract suite tests/contracts/cluster_contract.py runs on every cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from whet.base.errors import WhetError
from whet.config import Config


@dataclass(slots=True, frozen=True)
class Placement:
    """The number of workers, and how they share the work."""

    ranks: int = 1
    ranks_per_shard: int = 1  # ranks that hold parts of one model replica: they get the same shard of the data
    deadline: float = 1800.0  # seconds that a call may take
    devices: int = 1  # devices per rank, with as many shares of cores

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_shard < 1 or self.ranks % self.ranks_per_shard:
            raise WhetError(
                f"a placement of {self.ranks} ranks can't be divided into shards of {self.ranks_per_shard} ranks: "
                "the number of ranks must be a positive multiple of the ranks of one model replica"
            )

    @property
    def shards(self) -> int:
        """The number of data-parallel ranks."""
        return self.ranks // self.ranks_per_shard


@dataclass(slots=True, frozen=True)
class RankInfo:
    """The rank of one worker in its group."""

    rank: int = 0
    ranks: int = 1
    shard: int = 0  # the data-parallel rank
    shards: int = 1
    rendezvous: str = ""  # host:port where the ranks of this group can meet: reserved for rank 0 to listen on
    remote: bool = False  # in another process than its caller
    store: str = ""  # a file where the ranks of one machine meet instead, private to this user


class WorkerGroup(Protocol):
    """Workers that are called together.

    Every call has the placement's deadline, counted from the call. A worker runs one call at a time, in the order of
    the calls. The first exception of a worker is raised in the caller, unchanged; a worker that
    died raises ``WorkerError`` with its rank, which takes precedence over errors of other ranks that it caused. A call
    that exceeds its deadline raises ``DeadlineError`` with the method and the ranks; a method that has begun can't be
    stopped and may still end later, but not after ``close``.
    """

    @property
    def placement(self) -> Placement: ...

    async def call(self, method: str, *args: object) -> list[Any]:
        """Call the method on every rank; return the results by rank."""
        ...

    async def scatter(self, method: str, shards: Sequence[object], *args: object) -> list[Any]:
        """Call ``method(shard, *args)`` with one shard per data-parallel rank; return one result for each, in order:
        that of the shard's first rank. The others send none."""
        ...

    def lead(self, method: str, *args: object, until: str) -> "Lead":
        """Call ``method`` on all ranks but the first and return at once: these ranks follow the first one, whose
        methods are called with the result, until it has run ``until``. Later calls of all ranks wait until that is
        called, and raise ``DeadlineError`` if it is not. A new lead, and ``close``, abandon one that was not ended."""
        ...

    async def close(self) -> None:
        """Close the workers and end their processes, in any state. Later calls raise; closing twice is allowed."""
        ...


class Lead(Protocol):
    """Calls of the first rank of a group, while all other ranks are in one call that follows them. An error of any rank
    is raised, as by a group; then the lead is abandoned."""

    async def call(self, method: str, *args: object) -> Any:
        """Call the method on the first rank; return its result."""
        ...

    async def end(self) -> Any:
        """Call ``until`` on the first rank; return its result when the other ranks have ended, too."""
        ...

    def abandon(self) -> None:
        """Have the first rank run ``until`` after its calls in progress, and don't wait. Does nothing after ``end``."""
        ...


class Cluster(Protocol):
    """Launches groups of workers."""

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        """Start building the workers and return at once. An error of building is raised by the first call. The first
        launch may take seconds, and raises ``WhetError`` if the cluster can't be reached."""
        ...

    def serve(
        self, service: type, config: Config, devices: int, deadline: float, shares: int | None = None
    ) -> "Service":
        """Return a service on any node, with a number of devices; nothing is started before the first call.
        ``deadline``: seconds without an answer after which its process counts as hung. ``shares``: it has the devices
        of that rank, and of the ranks after it, of the group that was launched first, and starts after that group."""
        raise WhetError("generator.on_cluster needs a cluster with nodes; set cluster=ray")

    async def close(self) -> None:
        """Release the cluster, after its groups were closed."""
        ...


class Service(Protocol):
    """An object on some node whose methods are coroutines; many calls run concurrently. It is built like a worker."""

    @property
    def where(self) -> str:
        """The process and node, for messages."""
        ...

    async def call(self, method: str, *args: object) -> Any:
        """Return the method's result or raise its exception; ``WorkerError`` if the object's process died,
        ``DeadlineError`` if it hangs. The first call waits for resources and for the actor. Cancelling the caller
        cancels the method."""
        ...

    async def close(self) -> None:
        """Call its ``close`` and end its process, in any state."""
        ...
