"""Where workers run. A cluster launches a worker class on some ranks; a worker group calls its methods on all of them.

Knows no model and no algorithm: what travels is a method's name, its arguments and its results. A worker is any class
that is built as ``worker(config, info)`` and whose methods are plain functions (no coroutines); a ``close`` method, if
it has one, is called at the end. One contract suite, tests/contracts/cluster_contract.py, runs on every cluster.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from whet.base.errors import WhetError
from whet.config import Config


@dataclass(slots=True, frozen=True)
class Placement:
    """The number of workers, and how they share the work."""

    ranks: int = 1
    ranks_per_shard: int = 1  # ranks that hold parts of one model replica: they get the same shard of the data
    deadline: float = 1800.0  # seconds that a call may take, unless it says otherwise
    devices: int = 1  # those that each rank takes, with as many shares of cores

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
    """The place of one worker among those of its group."""

    rank: int = 0
    ranks: int = 1
    shard: int = 0  # its data-parallel rank
    shards: int = 1
    rendezvous: str = ""  # host:port where the ranks of this group can meet: rank 0 may listen there, nobody else does
    remote: bool = False  # in another process than its caller
    store: str = ""  # a file where the ranks of one machine meet instead, private to this user


class WorkerGroup(Protocol):
    """Workers that are called together.

    Every call has a deadline in seconds (the placement's unless given), counted from when it is made. A worker runs
    one call at a time, in the order in which they were made. An exception of a worker reaches the caller as it is, as
    soon as the first worker raises; a worker that died raises ``WorkerError``, which names it, and goes before what
    the others raise because of it. A call that outlasts its deadline raises ``DeadlineError`` naming the method and
    the ranks; what a worker has begun can't be stopped and may still end later, but not after ``close``.
    """

    @property
    def placement(self) -> Placement: ...

    async def call(self, method: str, *args: Any, deadline: float | None = None) -> list[Any]:
        """The same call on every rank; the results by rank."""
        ...

    async def scatter(self, method: str, shards: list[Any], *args: Any, deadline: float | None = None) -> list[Any]:
        """``method(shard, *args)`` with one shard for each data-parallel rank; one result for each, in order."""
        ...

    async def close(self) -> None:
        """Close the workers, and end what runs them, whatever state they are in. Calls after that are errors; closing
        twice is not."""
        ...


class Cluster(Protocol):
    """Where workers can be launched."""

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        """Start building the workers and return at once. What building raises, the first call raises. The first launch
        may take seconds, and raises ``WhetError`` where there is no such cluster."""
        ...

    async def close(self) -> None:
        """Let go of the cluster, after its groups were closed."""
        ...


class Service(Protocol):
    """An object on some node whose methods are coroutines; many calls run side by side. It is built as a worker is."""

    @property
    def where(self) -> str:
        """Its process and node, for messages."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """Return what the method returns. Raises what it raises; ``WorkerError`` where the object is gone, and
        ``DeadlineError`` where its process hangs. The first call waits for room and for its actor. A caller that is
        cancelled cancels the method."""
        ...

    async def close(self) -> None:
        """Call its ``close``, and end its process, whatever state it is in."""
        ...
