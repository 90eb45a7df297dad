"""Several replicas behind one generator. An episode stays with its replica and the samples of one prompt meet on one,
where the prompt is computed once; what is neither goes to the least busy. Knows no engine by name.

Who waits for what: pauses and resumptions go to all replicas at once and return when the last has answered. Deadlines
are the replicas' own; an error names the replica it comes from."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from whet.errors import GeneratorError, WhetError
from whet.generators.base import Completion, Refittable, SamplingParams

if TYPE_CHECKING:
    import torch

M = TypeVar("M")
S = TypeVar("S")
T = TypeVar("T")


class Router(Generic[M]):
    """``slack``: how many more requests than the least busy one a replica may have before a prompt that it knows goes
    elsewhere."""

    def __init__(self, replicas: Sequence[Refittable[M]], slack: int = 16) -> None:
        self.replicas = tuple(replicas)
        self.slack = slack
        self.load = [0] * len(self.replicas)  # requests under way
        self._sessions: dict[str, int] = {}  # since the weights last changed: nothing older is cached anywhere
        self._prompts: dict[tuple[int, ...], int] = {}

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        """See ``Generator``."""
        number = self._choose(tuple(prompt), session)
        self.load[number] += 1
        try:
            call = self.replicas[number].sample(prompt, params, session)
            return await _named(call, number + 1, len(self.replicas))
        finally:
            self.load[number] -= 1

    def _choose(self, prompt: tuple[int, ...], session: str) -> int:
        """Return the session's replica; else the prompt's, where that is not too busy; else the least busy one."""
        idle = min(range(len(self.replicas)), key=self.load.__getitem__)
        number = self._sessions.get(session) if session else None
        if number is None:
            number = self._prompts.get(prompt, idle)
            if self.load[number] - self.load[idle] >= self.slack:
                number = idle
        if session:
            self._sessions[session] = number
        self._prompts.setdefault(prompt, number)
        return number

    async def pause(self) -> None:
        """Return once no replica reads the weights."""
        await of_each(self.replicas, lambda replica, _: replica.pause())

    async def resume(self, version: int) -> None:
        """See ``Generator``."""
        self._forget()
        await of_each(self.replicas, lambda replica, _: replica.resume(version))

    @property
    def dtype(self) -> "torch.dtype":
        """The same for all."""
        return self.replicas[0].dtype

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[Sequence[M]]:
        """See ``Refittable``."""
        await self.pause()  # all at once
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(replica.refit(version, adapter)) for replica in self.replicas]
            yield [model for models in opened for model in models]
        self._forget()

    def _forget(self) -> None:
        """Forget where prompts are cached: under new weights they are nowhere."""
        self._sessions.clear()
        self._prompts.clear()

    async def sleep(self) -> None:
        """See ``Generator``."""
        await of_each(self.replicas, lambda replica, _: replica.sleep())

    async def wake(self) -> None:
        """See ``Generator``."""
        await of_each(self.replicas, lambda replica, _: replica.wake())

    async def close(self) -> None:
        """Close all replicas, also where one of them raises."""
        await of_each(self.replicas, lambda replica, _: replica.close())


async def of_each(replicas: Sequence[S], work: Callable[[S, int], Awaitable[T]]) -> list[T]:
    """Return ``work(replica, number)`` for all of them at once, numbered from 1. Raises the first error when all have
    ended, that of a dead engine before what others raise because of it; it names the replica."""
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
