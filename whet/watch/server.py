"""``whet watch``: a page on loopback that shows runs while they train.

    browser ──token──► /            the page
                       /events      server-sent events: what changes at each step, by run
                       /charts      curves of a range of steps
                       /rollouts    a page of rollouts, by filters
                       /rollout     one episode

Each wait has a deadline: a client that takes no data, a folder that does not answer, a request that does not end. No
part of an address is a path of a file.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from whet.base.errors import DataError
from whet.base.escaping import escape_controls
from whet.base.listening import listen
from whet.endpoint.connections import Connections
from whet.endpoint.http_server import Server
from whet.show.page import page
from whet.watch.search import Query, Sort
from whet.watch.watched import WatchedRun

EVERY = 1.0  # seconds between two looks at the runs
DEADLINE = 20.0  # seconds for an answer, and for a client to take what it is sent
HEARTBEAT = 10.0  # seconds of silence after which a client is sent a comment
_CLOSING = 2  # seconds for answers in progress at the end
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}

Message = MutableMapping[str, Any]
_T = TypeVar("_T")


class _Asked(BaseModel):
    """The parameters of an address. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    token: str = ""
    run: int = Field(default=0, ge=0)


class _Charts(_Asked):
    low: float = float("-inf")
    high: float = float("inf")


class _Rollouts(_Asked):
    step: int | None = Field(default=None, ge=0)
    verdict: str = Field(default="", pattern="^(correct|wrong|)$")
    status: str = Field(default="", max_length=50)
    low: float | None = None
    high: float | None = None
    text: str = Field(default="", max_length=1000)
    sort: Sort = ""
    next: str | None = Field(default=None, pattern=r"^\d{1,12}:\d{1,18}$")


class _Rollout(_Asked):
    at: str = Field(pattern=r"^\d{1,12}:\d{1,18}$")


class Watch:
    """The server of some runs. ``url`` has the token; ``serve`` returns after ``close``."""

    def __init__(self, folders: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = [WatchedRun(folder) for folder in folders]
        self.token = secrets.token_urlsafe(24)
        self._listener = listen(host, port)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._listener.getsockname()[1]}/?token={self.token}"
        self._page = page(None, "whet watch")
        self._connections = Connections()
        self._changed = asyncio.Condition()
        self._closing = False
        self._state = b""  # the newest event
        self._number = 0  # of that event
        settings = uvicorn.Config(
            self._application(), ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
            server_header=False, timeout_graceful_shutdown=_CLOSING,
        )  # fmt: skip
        self._server = Server(settings, self._connections)

    async def serve(self) -> None:
        """Answer clients until ``close`` or cancellation."""
        followers = [asyncio.create_task(self._follow(run)) for run in self.runs]
        serving = asyncio.create_task(self._server.serve([self._listener]))
        try:
            done, _ = await asyncio.wait((serving, *followers), return_when=asyncio.FIRST_COMPLETED)
            for task in done:  # a follower ends by an error only
                await task
        finally:
            for task in (serving, *followers):
                task.cancel()
            for run in self.runs:
                run.threads.shutdown(wait=False, cancel_futures=True)
            self._listener.close()

    async def close(self) -> None:
        """End the streams of events and then the server."""
        self._closing = self._server.should_exit = True
        async with self._changed:
            self._changed.notify_all()

    async def _follow(self, run: WatchedRun) -> None:
        """Read a run as it grows. A folder that does not answer delays only its own run."""
        while True:
            more = await asyncio.get_running_loop().run_in_executor(run.threads, run.refresh)
            state = b'{"runs":[' + b",".join(each.summary for each in self.runs) + b"]}"
            if state != self._state:
                async with self._changed:
                    self._state, self._number = state, self._number + 1
                    self._changed.notify_all()
            await asyncio.sleep(0 if more else EVERY)

    async def newer(self, number: int) -> tuple[int, bytes] | None:
        """Return the newest event and its number once it is later than ``number``, and None after ``HEARTBEAT``
        seconds or at the end."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await self._changed.wait_for(lambda: self._number > number or self._closing)
            return (self._number, self._state) if self._number > number and not self._closing else None

    @property
    def closing(self) -> bool:
        return self._closing

    def _application(self) -> Starlette:
        answers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self._show, "/events": self._events, "/charts": self._show_charts,
            "/rollouts": self._find, "/rollout": self._open,
        }  # fmt: skip
        routes = [Route(path, self._guarded(answer)) for path, answer in answers.items()]
        return Starlette(routes=[*routes, Route("/{path:path}", self._guarded(self._nothing))])

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Check the token, and turn errors into answers."""

        async def guarded(request: Request) -> Response:
            token = request.query_params.get("token", "")
            if not secrets.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
                return _text(403, "wrong token: open the address that whet watch printed")
            if request.client is not None:
                self._connections.authorized((request.client.host, request.client.port))
            try:
                return await answer(request)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"]))
                return _text(400, f"{where}: {first['msg']}")
            except DataError as error:
                return _text(400, str(error))
            except (TimeoutError, OSError):
                return _text(503, "the run folder does not answer; try again")

        return guarded

    async def _show(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html", headers=_HEADERS)

    async def _nothing(self, request: Request) -> Response:
        return _text(404, "there is nothing at this address")

    async def _events(self, request: Request) -> Response:
        return Events(self, lambda: self._drop(request))

    async def _show_charts(self, request: Request) -> Response:
        asked = _Charts.model_validate(dict(request.query_params))
        run = self._run(asked)
        return await self._json(run, run.charts, (asked.low, asked.high))

    async def _find(self, request: Request) -> Response:
        # A field of the page that is empty bounds nothing.
        asked = _Rollouts.model_validate({name: text for name, text in request.query_params.items() if text})
        query = Query(asked.step, asked.verdict, asked.status, asked.low, asked.high, asked.text, asked.sort)  # type: ignore[arg-type]
        run = self._run(asked)
        return await self._json(run, run.rollouts, query, _place(asked.next) if asked.next else None)

    async def _open(self, request: Request) -> Response:
        asked = _Rollout.model_validate(dict(request.query_params))
        run = self._run(asked)
        return await self._json(run, run.rollout, _place(asked.at))

    def _run(self, asked: _Asked) -> WatchedRun:
        if asked.run >= len(self.runs):
            raise DataError(f"run {asked.run} is not watched: there are {len(self.runs)}, counted from 0")
        return self.runs[asked.run]

    async def _json(self, run: WatchedRun, answer: Callable[..., bytes], *values: object) -> Response:
        async with asyncio.timeout(DEADLINE):
            body = await asyncio.get_running_loop().run_in_executor(run.threads, answer, *values)
        return Response(body, media_type="application/json", headers=_HEADERS)

    def _drop(self, request: Request) -> None:
        if request.client is not None:
            self._connections.drop((request.client.host, request.client.port))


class Events(Response):
    """A stream of server-sent events. A slow client gets the newest state and misses those between."""

    def __init__(self, watch: Watch, drop: Callable[[], None]) -> None:
        super().__init__()
        self._watch, self._drop = watch, drop

    async def __call__(self, scope: object, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        gone = asyncio.create_task(_until_gone(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, sending):
                task.cancel()
            results = await asyncio.gather(gone, sending, return_exceptions=True)
        if any(isinstance(result, TimeoutError) for result in results):
            self._drop()

    async def _send(self, send: Callable[[Message], Awaitable[None]]) -> None:
        headers = {**_HEADERS, "Content-Type": "text/event-stream"}
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        number = 0
        while not self._watch.closing:
            newer = await self._watch.newer(number)
            body = b": still here\n\n"
            if newer is not None:
                number, body = newer[0], b"data: " + newer[1] + b"\n\n"
            async with asyncio.timeout(DEADLINE):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _place(text: str) -> tuple[int, int]:
    step, _, offset = text.partition(":")
    return int(step), int(offset)


def _text(status: int, text: str) -> Response:
    return PlainTextResponse(escape_controls(text), status, _HEADERS)
