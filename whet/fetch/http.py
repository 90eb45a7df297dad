"""HTTP requests to servers of other parties: each has a deadline and an answer of bounded length, and repeated requests
spread out."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

from whet.base.extras import extra
from whet.base.seeds import derive_seed

with extra("tasks", "a judge or a server of NeMo Gym"):
    import httpx
    from httpx import Cookies as Cookies

T = TypeVar("T")
_LONGEST_PAUSE = 10.0  # seconds between two attempts
_LONGEST_ASKED = 60.0  # if the server says how long to wait


class UnansweredError(Exception):
    """A request without a usable answer, which may be repeated: the connection broke, the deadline passed, the answer
    was too long, or the caller rejects it."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        """``wait``: the seconds that the server asks to wait before a repeat."""
        super().__init__(why)
        self.wait = wait


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a server."""

    status: int
    text: str
    wait: float = 0.0  # the seconds that the server asks to wait before a repeat

    def json(self) -> Any:
        """Return the value of the text. Raises ``ValueError`` if it is not JSON, or nested too deeply."""
        try:
            return json.loads(self.text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


class HttpClient:
    """Sends and reads JSON. ``transport`` replaces the network in tests."""

    def __init__(
        self,
        deadline: float | None,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        setting: str | None = None,
    ) -> None:
        """``deadline`` is in seconds, for the whole of one request (None: the caller's); ``setting`` names in errors
        where it comes from; ``max_bytes`` bounds an answer."""
        self.deadline, self.max_bytes = deadline, max_bytes
        self._within = "" if setting is None else f"{setting} = "
        self._http = httpx.AsyncClient(
            timeout=deadline,
            headers=headers,
            transport=transport,
            limits=httpx.Limits(max_connections=None),
            cookies=CookieJar(
                DefaultCookiePolicy(allowed_domains=())
            ),  # cookies belong to a session, not to the client
        )

    async def post(
        self, url: str, body: object, cookies: Cookies | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Return the answer to one request, whatever its status. ``cookies`` are sent and updated. Raises
        ``UnansweredError``."""
        return await self._answer(self._http.build_request("POST", url, json=body, headers=headers), cookies)

    async def follow(self, url: str, body: object, event: Callable[[str], None]) -> Answer:
        """Post a request and call ``event`` with the data of each server-sent event as it arrives. Return the answer,
        whatever its status, with the text of anything but a stream of events. Raises ``UnansweredError``."""
        return await self._answer(self._http.build_request("POST", url, json=body), None, event)

    async def get(self, url: str) -> Answer:
        """Return what is at an address, whatever the status. Raises ``UnansweredError``."""
        return await self._answer(self._http.build_request("GET", url), None)

    async def _answer(
        self, request: httpx.Request, cookies: Cookies | None, event: Callable[[str], None] | None = None
    ) -> Answer:
        try:
            async with asyncio.timeout(self.deadline):
                return await self._send(request, cookies, event)
        except (httpx.TimeoutException, TimeoutError):
            raise UnansweredError(f"no answer within {self._within}{self.deadline:g} s") from None
        except httpx.HTTPError as error:
            raise UnansweredError(f"{type(error).__name__}: {error}") from None

    async def _send(
        self, request: httpx.Request, cookies: Cookies | None, event: Callable[[str], None] | None
    ) -> Answer:
        if cookies is not None:
            cookies.set_cookie_header(request)
        answer = await self._http.send(request, stream=True)
        content, pending, received = b"", b"", 0
        streams = event is not None and answer.headers.get("content-type", "").startswith("text/event-stream")
        try:
            async for piece in answer.aiter_bytes():
                received += len(piece)
                if received > self.max_bytes:
                    raise UnansweredError(f"the answer is longer than {self.max_bytes} bytes")
                if event is None or not streams:
                    content += piece
                    continue
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        event(line.removeprefix(b"data:").strip().decode("utf-8", "replace"))
        finally:
            await answer.aclose()
        if cookies is not None:
            cookies.extract_cookies(answer)
        text = content.decode("utf-8", "replace")
        if answer.has_redirect_location:  # which is not followed: it may be a page to log in, or another party's
            text = f"it sends to {answer.headers['location']}; name the address that answers"
        return Answer(answer.status_code, text, _wait(answer.headers))

    async def close(self) -> None:
        await self._http.aclose()


def get_json(url: str, deadline: float) -> object:
    """Return the JSON at an address. Raises ``httpx.HTTPError`` or ``ValueError``."""
    return httpx.get(url, timeout=deadline).raise_for_status().json()


async def retried(attempt: Callable[[int], Awaitable[T]], retries: int, *name: int | str) -> T:
    """Return the result of ``attempt``, which is called with the number of the attempt, from 0, and again after an
    ``UnansweredError``. Raises the last of these after ``retries`` repeats. Pauses are drawn from ``name``, and are not
    shorter than what the server asks for, up to a minute."""
    for number in range(retries):
        try:
            return await attempt(number)
        except UnansweredError as error:
            await asyncio.sleep(max(pause(number + 1, *name), min(error.wait, _LONGEST_ASKED)))
    return await attempt(retries)


def _wait(headers: Mapping[str, str]) -> float:
    """Return the seconds of the header Retry-After; 0 without one, or with a date."""
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0


def pause(attempt: int, *name: int | str) -> float:
    """Return the seconds to wait before repeat 1, 2 ... of a request: they double, and are drawn from the name, so that
    requests which failed together are not repeated together."""
    rng = random.Random(derive_seed("pause", *name, attempt))
    return min(0.2 * 2**attempt, _LONGEST_PAUSE) * rng.uniform(0.5, 1.0)
