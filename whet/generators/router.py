"""Several replicas behind one generator. An episode stays with its replica and the samples of one prompt meet on one,
where the prompt is computed once; what is neither goes to the least busy. Knows no engine by name.

Who waits for what: pauses and resumptions go to all replicas at once and return when the last has answered. Deadlines
are the replicas' own; an error names the replica it comes from."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from whet.errors import WhetError
from whet.generators.base import Completion, Generator, SamplingParams

T = TypeVar("T")


class Router:
    """``slack``: how many more requests than the least busy one a replica may have before a prompt that it knows goes
    elsewhere."""

    def __init__(self, replicas: Sequence[Generator], slack: int = 16) -> None:
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
            return await self._named(number, self.replicas[number].sample(prompt, params, session))
        finally:
            self.load[number] -= 1

    def _choose(self, prompt: tuple[int, ...], session: str) -> int:
        """The session's replica; else the prompt's, where that is not too busy; else the least busy one."""
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
        await self._all([replica.pause() for replica in self.replicas])

    async def resume(self, version: int) -> None:
        """See ``Generator``."""
        self.weights_changed()
        await self._all([replica.resume(version) for replica in self.replicas])

    async def sleep(self) -> None:
        """See ``Generator``."""
        await self._all([replica.sleep() for replica in self.replicas])

    async def wake(self) -> None:
        """See ``Generator``."""
        await self._all([replica.wake() for replica in self.replicas])

    def weights_changed(self) -> None:
        """Nothing is cached under the new weights, so no request is drawn anywhere."""
        self._sessions.clear()
        self._prompts.clear()

    async def close(self) -> None:
        """All replicas, also where one of them can't be closed in good order."""
        await self._all([replica.close() for replica in self.replicas])

    async def _all(self, calls: Sequence[Awaitable[None]]) -> None:
        answers = await asyncio.gather(
            *(self._named(number, call) for number, call in enumerate(calls)), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _named(self, number: int, call: Awaitable[T]) -> T:
        try:
            return await call
        except WhetError as error:
            error.args = (f"replica {number + 1} of {len(self.replicas)}: {error}",)
            raise
