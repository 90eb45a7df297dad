"""What runs inside a Ray actor: a host for one worker, which says first where it is. Imports Ray only in an actor."""

import os
import pickle
from dataclasses import dataclass
from inspect import isawaitable
from logging import LogRecord

from whet.cluster.group import call_method
from whet.cluster.host import Host, Reply, collect, failed
from whet.cluster.rendezvous import Reservation
from whet.processes.child import kill_on_parent_exit
from whet.processes.machine import bind, cores


@dataclass(slots=True, frozen=True)
class Location:
    """Where an actor runs."""

    node: str  # Ray's id of the node
    address: str  # of the node, for its neighbours
    pid: int
    cores: int  # of the node


class RayHost(Host):
    """Methods for the far side of ``RayCluster``."""

    concurrency = 1
    """Calls that run side by side; more wait."""

    def home(self) -> Location:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Location(node, ray.util.get_node_ip_address(), os.getpid(), cores())

    def reserve(self) -> str:
        """``host:port`` on this node, kept free while this actor lives."""
        import ray

        self._meeting = Reservation(ray.util.get_node_ip_address())
        return self._meeting.address

    def start(self, pickled: bytes, threads: str | None, cores: list[int] | None = None) -> Reply:
        """Build the worker, bound to ``cores`` if there are any.

        It is pickled, because OpenMP reads its setting once, when torch is imported; Ray has set it to the actor's
        share of cores, which is not what None means.
        """
        kill_on_parent_exit(os.getppid())  # a killed Ray node can't end a frozen worker
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        if cores is not None:
            bind(cores)
        return self.build(*pickle.loads(pickled))

    def answer(self, request: tuple[str, tuple[object, ...]]) -> Reply:
        """Run one method."""
        return self.call(*request)


class RayAsyncHost(RayHost):
    """The same for an object whose methods are coroutines, or plain functions that take no time."""

    concurrency = 100_000  # a refit must not wait for samples, which wait for it

    def __init__(self) -> None:
        super().__init__()
        self._log: list[LogRecord] = []  # goes with the next answer
        collect(self._log)

    async def ask(self, method: str, args: tuple[object, ...]) -> Reply:
        """Run one method beside others."""
        try:
            value = call_method(self._worker, method, args)
            reply = Reply([], await value if isawaitable(value) else value)
        except Exception as error:
            reply = failed(error, [])
        reply.log, self._log[:] = self._log[:], []
        return reply
