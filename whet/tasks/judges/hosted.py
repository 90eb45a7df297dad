"""A judge that the run hosts: a frozen model on the built-in engine, in a separate process. It speaks OpenAI's chat
API through a socket pair: nothing listens on a port. This module doesn't import torch.

Who waits for whom: a request waits for the process to start, until ``start_s``, and for its reply until the judge's
``deadline``. A process that ends, or doesn't respond for the deadline, is replaced with the next request; the requests
that it left without a reply are repeated like those to a server that fails. The process ends with its owner.
"""

import asyncio
import json
import logging

from whet.base.errors import ConfigError, DeadlineError, WorkerError
from whet.fetch.http import Answer, UnansweredError
from whet.processes.service import Service, ServiceLostError
from whet.tasks.judges.config import Judge

log = logging.getLogger(__name__)
_HOSTED = "whet.endpoint.hosted_judge:HostedJudge"  # by name, because it imports torch


class HostedLine:
    """The connection to a hosted judge, used like ``HttpClient``. All calls must come from one event loop."""

    def __init__(self, judge: Judge, name: str) -> None:
        """``name`` names the judge in messages."""
        self.judge, self.name = judge, name
        self._dtype = judge.process.dtype  # a process that replaces another one computes in the same
        self._service: Service | None = None
        self._starting = asyncio.Lock()
        self._started = self._closed = False  # started: a process was ready once

    async def post(self, url: str, body: object) -> Answer:
        """Return the answer to a request of the chat API; the ``url`` is not read. Raises ``UnansweredError``, and
        ``WhetError`` for a model that can't be loaded."""
        try:
            service = await self._running()
            async with asyncio.timeout(self.judge.deadline):
                status, text = await service.call("answer", json.dumps(body))
        except TimeoutError:
            raise UnansweredError(f"no answer within judge.deadline = {self.judge.deadline:g} s") from None
        except ServiceLostError as error:
            raise UnansweredError(str(error)) from None
        return Answer(status, text)

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            if self._service is not None:
                await self._service.close()

    async def _running(self) -> Service:
        async with self._starting:
            if self._closed:
                raise UnansweredError(f"{self.name} is closed")
            if self._service is not None and self._service.lost:
                log.warning("%s: %s; it is started again", self.name, self._service.lost)
                lost, self._service = self._service, None
                await lost.close()
            if self._service is None:
                self._service = await self._start()
                self._started = True
            if self._dtype == "auto":
                self._dtype = await self._service.call("computes_in")
                log.info("%s computes in %s", self.name, self._dtype)
            return self._service

    async def _start(self) -> Service:
        judge, process = self.judge, self.judge.process
        arguments = (
            judge.model,
            judge.revision,
            self._dtype,
            process.threads,
            process.max_context,
            process.max_batch,
        )
        try:
            return await Service.started(_HOSTED, arguments, start_s=process.start_s, blocked_s=judge.deadline)
        except (WorkerError, DeadlineError) as error:
            if self._started:
                raise UnansweredError(f"its process could not start: {error}") from None
            raise ConfigError(
                f"{self.name} could not start: {error}; see its messages above; raise judge.process.start_s, or set "
                "judge.process.dtype=bfloat16, if it needs more"
            ) from None
