"""The cluster in this process: workers are objects that run on its compute thread. Arguments and results are passed
without copies."""

from collections.abc import Callable
from functools import partial
from typing import Any

from whet.cluster.base import Cluster, Placement, WorkerGroup
from whet.cluster.call import Call, call_method
from whet.cluster.group import LinkedGroup
from whet.cluster.rendezvous import LOOPBACK, Reservation, rank_infos
from whet.config import Config
from whet.processes.compute import COMPUTE


class LocalCluster(Cluster):
    """Launches workers in this process."""

    def launch(self, worker: type, config: Config, placement: Placement) -> WorkerGroup:
        meeting = Reservation(LOOPBACK)
        links = [_Object(partial(worker, config, info), meeting) for info in rank_infos(placement, meeting.address)]
        return LinkedGroup(worker, placement, links)

    async def close(self) -> None:
        """Nothing to close."""


class _Object:
    """A link to a worker in this process."""

    where = ""
    thread = COMPUTE

    def __init__(self, make: Callable[[], object], meeting: Reservation) -> None:
        self._make, self._meeting = make, meeting
        self._worker: Any = None

    def build(self) -> None:
        self._worker = self._make()

    def call(self, call: Call) -> object:
        return call_method(self._worker, call.method, call.args)

    def end(self) -> None:
        self._worker = None
