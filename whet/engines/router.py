"""Several replicas as one generator. ``Placement`` chooses the replica of each request: where most of its prompt is
cached, unless that replica is too busy.

A replica that dies or freezes (``GeneratorError``, ``DeadlineError``) is lost: other replicas serve its requests in
flight, and a new one is started in its place in the background, which serves after the next successful refit:

    serving ──dies, freezes──► lost ──a new one is started──► ready ──verified refit──► serving

Who waits for whom: pauses and resumptions go to all replicas at once and return when the last has answered. Deadlines
are set by the replicas; an error names the replica it comes from. If no replica is serving, every call is an error.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from whet.base.errors import DeadlineError, GeneratorError, ReplicaLostError, WhetError
from whet.engines.base import Completion, HandedOut, PausableEngine, SamplingParams, StreamingEngine, check_completion
from whet.engines.placement import Placement
from whet.metrics import Metrics

if TYPE_CHECKING:
    import torch

M = TypeVar("M")
S = TypeVar("S")
T = TypeVar("T")
LOST = (GeneratorError, DeadlineError)
log = logging.getLogger(__name__)


class Router(Generic[M]):
    """``prefix_weight`` is the weight of ``Placement``. ``rebuild`` creates a new engine for a replica's number, at
    most ``restarts`` times in a row: an answer of the replica ends the row."""

    def __init__(
        self,
        replicas: Sequence[PausableEngine[M]],
        prefix_weight: float = 2.0,
        rebuild: Callable[[int], PausableEngine[M]] | None = None,
        restarts: int = 0,
    ) -> None:
        self.replicas = list(replicas)
        self.rebuild = rebuild
        self.placement = Placement(len(self.replicas), prefix_weight)
        self.serving = set(range(len(self.replicas)))
        self.ready = set[int]()  # started as replacements of lost replicas
        self._restarts = restarts
        self._restarted = [0] * len(self.replicas)  # how often each was since it last answered
        self._restarting = set[asyncio.Task[None]]()
        self._in_flight = [set[asyncio.Task[Completion]]() for _ in self.replicas]
        self._settled = asyncio.Event()  # set while no refit is in progress
        self._settled.set()
        self._metrics = Metrics()

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        """See ``Engine``. If its replica is lost, another one samples the request."""
        return await self._sample(prompt, params, lambda engine: engine.sample(prompt, params, session))

    async def stream(
        self, prompt: list[int], params: SamplingParams, session: str, sampled: Callable[[list[int]], None]
    ) -> Completion:
        """See ``StreamingEngine``. Tokens that a lost replica has handed out are not handed out again; replicas that
        don't stream hand out nothing."""
        handed_out = HandedOut(sampled)

        def begin(engine: PausableEngine[M]) -> Awaitable[Completion]:
            if isinstance(engine, StreamingEngine):
                return engine.stream(prompt, params, session, handed_out.from_the_first())
            return engine.sample(prompt, params, session)

        return await self._sample(prompt, params, begin)

    async def _sample(
        self,
        prompt: list[int],
        params: SamplingParams,
        begin: Callable[[PausableEngine[M]], Awaitable[Completion]],
    ) -> Completion:
        while True:
            await self._settled.wait()
            if not self.serving:
                raise GeneratorError(f"all {len(self.replicas)} replicas of the generator are lost")
            place = self.placement.begin(self.serving, prompt, params.max_new_tokens, params.images)
            number = place.number
            engine = self.replicas[number]
            task = asyncio.ensure_future(begin(engine))
            self._in_flight[number].add(task)
            try:
                await asyncio.wait({task})
                if self._is_alive(number, engine) or not task.cancelled():
                    completion = check_completion(await self._call(number, task), prompt, params, engine)
                    self.placement.answered(place, prompt, completion.tokens, params.images)
                    self._restarted[number] = 0
                    return completion
            except LOST as error:
                self._lose(number, engine, error)
            finally:
                task.cancel()  # if the caller is cancelled
                self.placement.end(place)
                self._in_flight[number].discard(task)

    # Replicas that are lost

    def _is_alive(self, number: int, engine: PausableEngine[M]) -> bool:
        return self.replicas[number] is engine and (number in self.serving or number in self.ready)

    def _lose(self, number: int, engine: PausableEngine[M], error: WhetError) -> None:
        """Take a replica out of service. Raises ``error`` if no other one is serving, or will after a refit in
        progress."""
        if not self._is_alive(number, engine):
            return  # already taken out of service
        others = self.serving if self._settled.is_set() else self.serving | self.ready
        if not others - {number}:
            raise error
        log.warning("a replica is taken out of service, the others continue: %s", error)
        self._metrics.sum("generator/lost", 1)
        self.serving.discard(number)
        self.ready.discard(number)
        self.placement.drop(number)
        for task in self._in_flight[number]:
            task.cancel()
        restarting = asyncio.ensure_future(self._restart(number))
        self._restarting.add(restarting)
        restarting.add_done_callback(self._restarting.discard)

    async def _restart(self, number: int) -> None:
        """Replace a lost replica by a new engine."""
        while True:
            with suppress(Exception):  # errors of a lost replica don't matter
                await self.replicas[number].close()
            if self.rebuild is None or self._restarted[number] == self._restarts:
                log.warning("replica %d of %d is not restarted any more", number + 1, len(self.replicas))
                return
            self._restarted[number] += 1
            self._metrics.sum("generator/restarts", 1)
            engine = self.replicas[number] = self.rebuild(number)
            try:
                await self._call(number, engine.pause())  # starts the engine
                self.ready.add(number)
                return
            except WhetError as error:
                log.warning("a replica could not be restarted: %s", error)

    async def _each(self, numbers: set[int], work: Callable[[PausableEngine[M]], Awaitable[None]]) -> None:
        """Run ``work`` with several replicas at once; replicas that are lost in it are taken out of service."""

        async def of(number: int) -> None:
            engine = self.replicas[number]
            try:
                await self._call(number, work(engine))
            except LOST as error:
                self._lose(number, engine, error)

        answers = await asyncio.gather(*map(of, sorted(numbers)), return_exceptions=True)
        errors = [answer for answer in answers if answer is not None]
        if errors:
            raise errors[0]

    async def _call(self, number: int, call: Awaitable[T]) -> T:
        return await _named(call, number + 1, len(self.replicas))

    # Pauses and weights

    async def pause(self) -> None:
        """Return once no replica reads the weights."""
        await self._each(self.serving, lambda replica: replica.pause())

    async def resume(self, version: int) -> None:
        """See ``PausableEngine``."""
        self.placement.clear()
        await self._each(self.serving, lambda replica: replica.resume(version))

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype, the same for all replicas."""
        return self.replicas[0].dtype

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[Sequence[M]]:
        """See ``Engine``. Raises ``ReplicaLostError`` if a replica is lost during the refit and others remain."""
        self._settled.clear()
        again = False  # after the loss of a replica, requests wait for the next refit
        engines: dict[int, PausableEngine[M]] = {}
        try:
            await self.pause()  # all at once
            engines |= {number: self.replicas[number] for number in sorted(self.serving | self.ready)}
            async with AsyncExitStack() as stack:
                opened = []
                for number, engine in engines.items():
                    opened.append(await self._call(number, stack.enter_async_context(engine.refit(version, adapter))))
                yield [model for models in opened for model in models]
        except LOST as error:
            await self._each(set(engines), lambda replica: replica.pause())  # find the lost one
            again = not all(self._is_alive(number, engine) for number, engine in engines.items())
            if not again:
                raise
            raise ReplicaLostError(f"during a refit, {error}") from error
        finally:
            if not again:
                self._settled.set()
        alive = {number for number, engine in engines.items() if self._is_alive(number, engine)}
        self.ready -= alive
        self.serving |= alive
        self.placement.clear()

    async def sleep(self, new_weights: bool = False) -> None:
        """See ``PausableEngine``."""
        if self._restarting:
            await asyncio.wait(self._restarting)  # a starting engine needs memory too
        await self._each(self.serving | self.ready, lambda replica: replica.sleep(new_weights))

    async def wake(self, new_weights: bool = False) -> None:
        """See ``PausableEngine``."""
        await self._each(self.serving | self.ready, lambda replica: replica.wake(new_weights))

    def tally(self) -> Metrics:
        """See ``Engine``."""
        metrics, self._metrics = self._metrics, Metrics()
        for replica in self.replicas:
            metrics.merge(replica.tally())
        return metrics

    async def close(self) -> None:
        """Close all replicas, even if one of them raises."""
        self._settled.set()  # wakes waiting requests
        for restarting in (tasks := list(self._restarting)):
            restarting.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await of_each(self.replicas, lambda replica, _: replica.close())


async def of_each(replicas: Sequence[S], work: Callable[[S, int], Awaitable[T]]) -> list[T]:
    """Return ``work(replica, number)`` for all replicas, run at once, numbered from 1. Raises the first error when all
    have ended, preferring the error of a dead engine to its consequences; the error names the replica."""
    jobs = [_named(work(replica, number), number, len(replicas)) for number, replica in enumerate(replicas, 1)]
    answers = await asyncio.gather(*jobs, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, GeneratorError))
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _named(call: Awaitable[T], number: int, of: int) -> T:
    try:
        return await call
    except WhetError as error:
        if of > 1:
            error.args = (f"replica {number} of {of}: {error}",)
        raise
