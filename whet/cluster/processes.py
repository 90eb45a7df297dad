"""The cluster of one machine without Ray: each worker is a child process. A rank's thread waits for its replies; the
group enforces the deadline of a call by abandoning that thread."""

import os
import pickle
from collections.abc import Sequence

from whet.base.errors import WhetError, WorkerError
from whet.cluster.base import Cluster, Placement, RankInfo, WorkerGroup
from whet.cluster.call import Call
from whet.cluster.group import LinkedGroup
from whet.cluster.host import Host, Reply
from whet.cluster.message import packed
from whet.cluster.rendezvous import LOOPBACK, PrivateFile, Reservation, rank_infos
from whet.config import Config
from whet.processes.child import Child, ChildDied, Message, Sending
from whet.processes.machine import cores, slice_for_rank, threads_per_rank

_FEWEST, _PER_CORE = 64, 8  # limit of processes: this number per core, but at least the first on any machine


class ProcessCluster(Cluster):
    """Launches each worker in a process of this machine. ``cores``: divided among the workers of a group."""

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        self.cores = cores

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        if worker.__module__ == "__main__" or "<" in worker.__qualname__:
            raise WhetError(
                f"another process can't import {worker.__qualname__}: it must be a top-level class of a module, not a "
                "class in a function or in the started script"
            )
        limit = max(_FEWEST, _PER_CORE * cores())
        if placement.ranks > limit:
            raise WhetError(
                f"{placement.ranks} ranks of {worker.__name__} need one process each, but this machine with {cores()} "
                f"cores is limited to {limit}; lower the sizes of parallel, or use cluster=ray with more machines"
            )
        meeting, file = Reservation(LOOPBACK), PrivateFile()
        links = []
        for info in rank_infos(placement, meeting.address, file.path):
            bound = None if self.cores is None else slice_for_rank(self.cores, info.rank, placement.ranks)
            child = Child(f"{Host.__module__}:Host", environment=_threads(bound, placement.ranks), cores=bound)
            links.append(ProcessLink(child, (worker, config, info), (meeting, file)))
        return LinkedGroup(worker, placement, links)

    async def close(self) -> None:
        """Nothing to close: groups end their processes."""


class ProcessLink:
    """A link to a worker in a process."""

    thread = None

    def __init__(
        self, child: Child, start: tuple[type, Config, RankInfo], meeting: tuple[Reservation, PrivateFile]
    ) -> None:
        self._child, self._start, self._rank = child, packed(start), start[2].rank
        self._meeting = meeting  # keeps the rendezvous reserved while the worker lives
        self.where = f"pid {child.process.pid} on this machine"

    def build(self) -> None:
        self._exchange(self._start)

    def call(self, call: Call) -> object:
        return self._exchange(lambda: call.packed(lambda *request: packed(request)))

    def end(self) -> None:
        self._child.kill()  # its close has already run
        self._meeting[1].remove()

    def _exchange(self, request: Message | Sending) -> object:
        try:
            reply: Reply = pickle.loads(self._child.exchange(request))
        except ChildDied as death:
            raise WorkerError(f"its process {death}") from None
        return reply.result(self._rank)


def _threads(cores: Sequence[int] | None, ranks: int) -> dict[str, str]:
    """Return the environment variable for a worker's number of threads. The user's setting takes precedence, except for
    a worker that is bound to cores: more threads than cores would wait for each other."""
    if cores is not None:
        return {"OMP_NUM_THREADS": str(len(cores))}
    return {} if ranks == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
