"""The code inside a Ray actor: a host for one worker that reports its location first. Imports Ray only in an actor."""

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import isawaitable
from logging import LogRecord

from whet.cluster.call import call_method
from whet.cluster.host import Host, Reply, collect, failed
from whet.cluster.rendezvous import Reservation
from whet.processes.child import kill_on_parent_exit
from whet.processes.machine import bind, cores


@dataclass(slots=True, frozen=True)
class Location:
    """The location of an actor."""

    node: str  # Ray's id of the node
    address: str  # of the node, for other nodes
    pid: int
    cores: int  # of the node
    gpus: tuple[str, ...] = ()  # its own, as in CUDA_VISIBLE_DEVICES of the node


class RayHost(Host):
    """The actor class of ``RayCluster``."""

    concurrency = 1
    """Calls that run concurrently; further calls wait."""

    def home(self) -> Location:
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return Location(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), cores(), gpus)

    def reserve(self) -> str:
        """Return a ``host:port`` on this node that stays reserved while this actor lives."""
        import ray

        self._meeting = Reservation(ray.util.get_node_ip_address())
        return self._meeting.address

    def start(
        self,
        pickled: bytes,
        threads: str | None,
        cores: list[int] | None = None,
        gpus: Sequence[str] | None = None,
    ) -> Reply:
        """Build the worker, bound to ``cores`` if given, on ``gpus`` instead of the ones that Ray assigned.

        The arguments are pickled, so that torch is imported after OMP_NUM_THREADS is set, which OpenMP reads only once.
        Ray has set it to the actor's share of cores; ``threads=None`` removes that.
        """
        kill_on_parent_exit(os.getppid())  # a killed Ray node can't end a frozen worker
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        if cores is not None:
            bind(cores)
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return self.build(*pickle.loads(pickled))

    def answer(self, request: tuple[str, tuple[object, ...], bool]) -> Reply:
        """Run one method."""
        return self.call(*request)


class RayAsyncHost(RayHost):
    """The same for an object whose methods are coroutines or fast plain functions."""

    concurrency = 100_000  # a refit must not wait for samples, which wait for it

    def __init__(self) -> None:
        super().__init__()
        self._log: list[LogRecord] = []  # sent with the next answer
        collect(self._log)

    async def ask(self, method: str, args: tuple[object, ...]) -> Reply:
        """Run one method concurrently with others."""
        try:
            value = call_method(self._worker, method, args)
            reply = Reply([], await value if isawaitable(value) else value)
        except Exception as error:
            reply = failed(error, [])
        reply.log, self._log[:] = self._log[:], []
        return reply
