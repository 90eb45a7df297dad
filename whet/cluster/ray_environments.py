"""Environment workers on any node of a Ray cluster. An actor starts the process of each worker on its node and forwards
calls, so a process ends, is blocked and is replaced as on the run's machine; an actor whose node is lost is replaced by
one on another node.
"""

import asyncio
import contextlib
from typing import Any

from pydantic import Field

from whet.base.errors import DeadlineError, WhetError, WorkerError
from whet.cluster.base import RankInfo
from whet.cluster.base import Service as Actor
from whet.cluster.config import RayClusterConfig
from whet.processes.child import STARTER
from whet.processes.service import Service, ServiceLostError, read_outcome
from whet.tasks.worker_process import WorkerProcess
from whet.tasks.workers import WorkerTasks

_SILENCE = 30.0  # seconds without an answer after which an actor is asked whether it responds


class RayWorkerTasks(WorkerTasks):
    """Tasks of ``taskset``, played and graded in processes on the nodes of a Ray cluster. Needs ``whet[ray]``."""

    address: str | None = None
    """As ``cluster.address``. None: the run's Ray cluster, or one that is started on this machine."""
    cpus: float = Field(0.1, gt=0)
    """Cores reserved for each worker."""

    async def started(self) -> "ActorProcess":
        actor = ActorProcess(self.address, self.cpus, self.process())
        await actor.start()
        return actor


class ActorProcess:
    """A ``Link`` to a process that an actor started."""

    def __init__(self, address: str | None, cpus: float, process: WorkerProcess) -> None:
        self.lost = ""
        seconds = process.start_s + process.install_s * bool(process.requirements)
        self._address = address
        config = RayClusterConfig(address=address, cpus_per_rank=cpus, gpus_per_rank=0, start_deadline=seconds)
        self._actor: Actor = config.build().serve(Relay, process, 1, _SILENCE)

    async def start(self) -> None:
        from whet.cluster.ray_connection import connect, leave

        # What Ray starts ends with the thread that started it, and the thread of these environments ends before others.
        await asyncio.wrap_future(STARTER.submit(connect, self._address, "ray_workers.address"))
        try:
            await self._actor.call("start")
        except BaseException:
            await self._actor.close()
            raise
        finally:
            leave()  # the actor holds the connection

    async def call(self, method: str, *arguments: object) -> Any:
        if self.lost:
            raise ServiceLostError(self.lost)
        try:
            payload = await self._actor.call("ask", method, arguments)
        except ServiceLostError as error:
            self.lost = f"{error} ({self._actor.where})"
        except (WorkerError, DeadlineError) as error:
            self.lost = f"its actor ({self._actor.where}) is gone: {error}"
        else:
            return read_outcome(payload, method)
        raise ServiceLostError(self.lost)

    async def close(self) -> None:
        with contextlib.suppress(WhetError):
            await self._actor.close()


class Relay:
    """The object in an actor, which forwards calls to a process on its node."""

    def __init__(self, process: WorkerProcess, info: RankInfo) -> None:
        self._process = process
        self._service: Service | None = None

    async def start(self) -> None:
        self._service = await self._process.started()

    async def ask(self, method: str, arguments: tuple[object, ...]) -> bytes:
        assert self._service is not None, "start comes first"
        return await self._service.ask(method, arguments)

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()
