"""The process of an environment worker, with what it needs to start on any machine."""

import asyncio
from typing import Any, Protocol

from whet.base.strict_json import JsonObject
from whet.config import Config
from whet.processes.service import Service
from whet.processes.virtual_environment import interpreter
from whet.tasks.hosted import HostedEnvironments

_HOSTED = f"{HostedEnvironments.__module__}:{HostedEnvironments.__qualname__}"


class Link(Protocol):
    """The connection to the process of a worker. All calls come from one event loop."""

    lost: str
    """Why no call can be made; empty while the process runs."""

    async def call(self, method: str, *arguments: object) -> Any:
        """Return the result of a method of ``HostedEnvironments``; ``ServiceLostError`` if the process ends before."""
        ...

    async def close(self) -> None:
        """End the process, in any state."""
        ...


class WorkerProcess(Config):
    """The settings of a worker's process, all of them plain data."""

    taskset: JsonObject
    requirements: tuple[str, ...]
    python: str | None
    install_s: float
    start_s: float
    blocked_s: float
    memory_gib: float | None

    def interpreter(self) -> str | None:
        """Return the path of the interpreter on this machine, which is made if it is missing; None: the run's."""
        if not self.requirements and self.python is None:
            return None
        return interpreter(self.requirements, self.python, self.install_s)

    async def started(self) -> Service:
        """Start the process on this machine."""
        return await Service.started(
            _HOSTED,
            (self.taskset,),
            start_s=self.start_s,
            blocked_s=self.blocked_s,
            memory=None if self.memory_gib is None else int(self.memory_gib * 2**30),
            interpreter=await asyncio.to_thread(self.interpreter),
        )
