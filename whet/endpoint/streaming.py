"""A response whose events are sent while the answer is sampled.

    engine ──tokens──► Session ──thought and text so far──► Progress ──► AnswerStream ──events──► client

The status is sent with the first event, so a call that is refused has its own status. If the client goes away, the
sample is cancelled and nothing is recorded.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from whet.chat.renderer import Renderer
from whet.endpoint.request import Answer, Request, api_error
from whet.rollouts.watched import Watch


class Progress:
    """The part of a reply that is decided so far."""

    def __init__(self) -> None:
        self.prompt, self.thought, self.text = 0, "", ""
        self._changed = asyncio.Event()

    def watch(self, prompt: int, thought: str, text: str) -> None:
        """See ``Watch``."""
        self.prompt, self.thought, self.text = prompt, thought, text
        self._changed.set()

    async def more(self, answering: "asyncio.Task[Answer]") -> bool:
        """Return when more is decided, or when the answer is complete or has failed; then False."""
        answering.add_done_callback(lambda _: self._changed.set())
        await self._changed.wait()
        self._changed.clear()
        return not answering.done()


class AnswerStream(Response):
    """The streamed answer to ``call``. ``answer`` starts the sampling, watched by what it is given."""

    def __init__(self, call: Request, answer: Callable[[Watch], Awaitable[Answer]], renderer: Renderer) -> None:
        super().__init__(media_type="text/event-stream")
        self.counted = ExitStack()  # left at the end
        self._call, self._renderer, self._progress = call, renderer, Progress()
        self._answering: asyncio.Task[Answer] = asyncio.ensure_future(_awaited(answer(self._progress.watch)))

    async def begun(self) -> None:
        """Return when the first part of the answer is there. Raises the error of the call."""
        if not await self._progress.more(self._answering):
            self._answering.result()

    async def close(self) -> None:
        """Cancel the sample, unless it is complete."""
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self.counted.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await StreamingResponse(self._events(), media_type=self.media_type)(scope, receive, send)
        finally:
            await self.close()

    async def _events(self) -> AsyncIterator[str]:
        progress, answering = self._progress, self._answering
        begun = Answer({"role": "assistant", "content": ""}, [0] * progress.prompt, [], [])
        if answering.done():
            begun = replace(begun, prompt=answering.result().prompt, cached=answering.result().cached)
        events = self._call.events(self._call.body(begun, self._renderer))
        for event in events.begin():
            yield event
        try:
            while not answering.done():
                for event in events.more(progress.thought, progress.text):
                    yield event
                await progress.more(answering)
            answer = replace(answering.result(), id=begun.id, created=begun.created)
            for event in events.more(answer.message.get("reasoning_content", ""), str(answer.message["content"])):
                yield event
            for event in events.end(self._call.body(answer, self._renderer)):
                yield event
        except Exception as error:
            yield events.failed(api_error(error))


async def _awaited(answer: Awaitable[Answer]) -> Answer:
    return await answer
