"""Requests in flight: the compute thread passes their tokens and results to the event loops that wait for them."""

import asyncio
from collections.abc import Iterable

from whet.base.errors import GeneratorError, WhetError
from whet.base.memory import lack_of_memory
from whet.engines.base import Completion
from whet.engines.torch.decoder import Request

Outcome = Completion | Exception


class InFlight:
    """The requests whose callers wait, each with its future."""

    def __init__(self) -> None:
        self._futures: dict[Request, asyncio.Future[Completion]] = {}

    @property
    def requests(self) -> list[Request]:
        return list(self._futures)

    def add(self, request: Request) -> "asyncio.Future[Completion]":
        """Return the future of a request of the running loop."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        return future

    def remove(self, request: Request) -> None:
        """Forget a request, if it is known."""
        self._futures.pop(request, None)

    def settle(self, request: Request, outcome: Outcome) -> None:
        """Set the result of a request; called in its loop."""
        future = self._futures.get(request)
        if future is None or future.done():
            return
        if isinstance(outcome, Completion):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def report(self, outcomes: Iterable[tuple[Request, Outcome]]) -> None:
        """Set results from any thread."""
        for request, outcome in outcomes:
            if (loop := self._loop(request)) is not None:
                loop.call_soon_threadsafe(self.settle, request, outcome)

    def hand_out(self, requests: Iterable[Request]) -> None:
        """Pass the new tokens of unfinished requests to the callers that watch them, from any thread."""
        for request in requests:
            if request.sampled is not None and (loop := self._loop(request)) is not None:
                new, request.handed_out = request.tokens[request.handed_out :], len(request.tokens)
                loop.call_soon_threadsafe(request.sampled, new)

    def _loop(self, request: Request) -> asyncio.AbstractEventLoop | None:
        future = self._futures.get(request)
        return None if future is None or future.get_loop().is_closed() else future.get_loop()


def engine_error(failure: BaseException) -> WhetError:
    """Return the outcome of every request after a step that failed."""
    if isinstance(failure, WhetError):
        return failure
    amounts = lack_of_memory(failure)
    if amounts is None:
        error = GeneratorError(f"the torch generator's engine failed: {type(failure).__name__}: {failure}")
    else:
        error = GeneratorError(
            f"the torch generator is out of memory{amounts}: lower generator.max_batch, generator.prefill_tokens or "
            "generator.prefix_tokens, or shorten prompts and answers"
        )
    error.__cause__ = failure
    return error
