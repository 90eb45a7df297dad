"""An object in a child process whose methods are coroutines, many of which run at once.

    Service (the owner's event loop)                    the child
      call(method, ...) ── number, method, ... ──▶  a thread with an event loop: await object.method(...)
                        ◀── number, outcome ──────

Who waits for whom: a call waits for its outcome without a deadline of the service; a caller that is cancelled cancels
the method. The owner asks every few seconds whether the object responds; a process that doesn't, for ``blocked_s``
seconds, is killed. All calls to a process that ended raise ``ServiceLostError``. Independent of the object's methods,
except ``responds`` and ``blocked_at``.
"""

import asyncio
import contextlib
import errno
import os
import pickle
import socket
import threading
import traceback
from dataclasses import dataclass
from typing import Any, Protocol, Self

from whet.base.errors import CallError, DataError, WhetError
from whet.processes.child import Answer, Child, resolve, thread_settings
from whet.processes.loop_thread import exit_forked_children
from whet.processes.pool_worker import OUT_OF_BOUNDS, set_up
from whet.processes.user_code import user_frames

_LOOKS = 10  # the number of times that the owner looks for a response before it kills the process
_NAMING = 2.0  # seconds to name the line that blocks a process


class ServiceLostError(CallError):
    """The process of a service ended, or was killed because it was blocked."""


class Served(Protocol):
    """The object in the child; all other methods are called by name."""

    async def responds(self) -> None:
        """Return once the object's code isn't blocked."""

    async def blocked_at(self) -> str | None:
        """Return the line that blocks the object's code, "FILE:LINE in FUNCTION"."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a call."""

    value: object = None
    error: bytes | None = None  # a pickled exception; empty if it can't be pickled
    text: str = ""  # of the exception
    frames: tuple[tuple[str, int | None, str, str | None], ...] = ()  # user's lines: file, line, function, text

    def result(self) -> Any:
        """Return the value or raise the error, which ``user_frames`` finds in the lines of the child. An error whose
        class can't be imported here becomes a ``RuntimeError`` with its text."""
        if self.error is None:
            return self.value
        try:
            error: Exception = pickle.loads(self.error)
        except Exception:
            error = RuntimeError(self.text)
        lines = [traceback.FrameSummary(file, line, name, line=text) for file, line, name, text in self.frames]
        error.child_frames = lines  # type: ignore[attr-defined]
        raise error


class Service:
    """The owner's side. Belongs to one event loop."""

    def __init__(self, blocked_s: float) -> None:
        self.blocked_s = blocked_s
        self.lost = ""  # why no call can be made
        self._numbers = 0
        self._waiting = dict[int, asyncio.Future[bytes]]()
        self._jobs = list[asyncio.Task[None]]()
        self._child: Child | None = None
        self._writer: asyncio.StreamWriter

    @classmethod
    async def started(
        cls, make: str, arguments: tuple[object, ...], *, start_s: float, blocked_s: float, memory: int | None = None,
        interpreter: str | None = None,
    ) -> Self:  # fmt: skip
        """Return a service for ``make(*arguments)`` ("module:name") in a new process, of at most ``memory`` bytes,
        under an ``interpreter`` (see ``Child``). Raises the error of ``make``, ``WorkerError`` or ``DeadlineError``."""
        service = cls(blocked_s)
        ours, theirs = socket.socketpair()
        request = pickle.dumps((make, arguments, memory))

        def start() -> bytearray:
            with theirs:
                service._child = Child(f"{__name__}:serving", environment=thread_settings(1), interpreter=interpreter)
                return service._child.exchange(request, start_s, [theirs.fileno()])

        try:
            pickle.loads(await asyncio.to_thread(start)).result()
            reader, service._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            service.kill()
            ours.close()
            raise
        service._jobs = [asyncio.create_task(service._read(reader)), asyncio.create_task(service._watch())]
        return service

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.process.pid

    async def call(self, method: str, *arguments: object) -> Any:
        """Return the method's result or raise its exception; ``ServiceLostError`` if the process ends before."""
        return read_outcome(await self.ask(method, arguments), method)

    async def ask(self, method: str, arguments: tuple[object, ...]) -> bytes:
        """Return the outcome of a call for ``read_outcome``."""
        if self.lost:
            raise ServiceLostError(self.lost)
        self._numbers += 1
        number = self._numbers
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send((number, method, arguments))
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self.lost:
                self._send((number, "", ()))
            raise
        finally:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """End the process, in any state. Pending calls raise."""
        self._end("its process was closed")
        if self._child is not None:
            self._child.kill()

    async def close(self) -> None:
        """End the process and the tasks of the service."""
        self.kill()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _send(self, request: object) -> None:
        self._writer.write(_framed(pickle.dumps(request)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, payload = pickle.loads(await _frame(reader))
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(payload)
        assert self._child is not None
        how = await asyncio.to_thread(self._child.how_it_ended)
        self._end(f"its process {how}")
        await asyncio.to_thread(self._child.kill)  # its forks

    async def _watch(self) -> None:
        """Kill the process if it is blocked. The time is counted in turns of this loop, which may itself be late."""
        while not self.lost:
            response = asyncio.create_task(self.call("responds"))
            for _ in range(_LOOKS):
                await asyncio.sleep(self.blocked_s / _LOOKS)
                if response.done():
                    break
            else:
                response.cancel()
                place = None
                with contextlib.suppress(TimeoutError, WhetError):
                    async with asyncio.timeout(_NAMING):
                        place = await self.call("blocked_at")
                at = f" at {place}" if place else ""
                self._end(f"its process was blocked{at} for {self.blocked_s:g} s and was killed")
                assert self._child is not None
                await asyncio.to_thread(self._child.kill)
            await asyncio.gather(response, return_exceptions=True)

    def _end(self, why: str) -> None:
        self.lost = self.lost or why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ServiceLostError(self.lost))
        if self._jobs:
            self._writer.close()


def read_outcome(payload: bytes, method: str) -> object:
    """Return the result of a call of ``method``, or raise its exception."""
    try:
        outcome: Outcome = pickle.loads(payload)
    except Exception as error:
        raise DataError(f"{method} returned an object of a class that only its process can import: {error}") from None
    return outcome.result()


def serving() -> Answer:
    """Return the request handler of the child, which builds the object and answers calls on the given socket."""

    def answer(request: bytearray, file: int) -> bytes:
        os.set_inheritable(file, False)
        make, arguments, memory = pickle.loads(request)
        set_up(None, (), memory)
        try:
            served = resolve(make)(*arguments)
        except BaseException as error:
            return failed(MemoryError(str(error)) if _is_out_of_memory(error) else error)
        loop = asyncio.new_event_loop()
        exit_forked_children(loop)
        link = socket.socket(fileno=file)
        threading.Thread(target=loop.run_until_complete, args=(_serve(link, served),), daemon=True).start()
        return pickle.dumps(Outcome())

    return answer


async def _serve(link: socket.socket, served: Served) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    running = dict[int, asyncio.Task[None]]()

    async def run(number: int, method: str, arguments: tuple[object, ...]) -> None:
        try:
            payload = pickle.dumps(Outcome(await getattr(served, method)(*arguments)))
        except asyncio.CancelledError:
            return
        except BaseException as error:
            if _is_out_of_memory(error):
                os._exit(OUT_OF_BOUNDS)
            payload = failed(error)
        finally:
            running.pop(number, None)
        writer.write(_framed(pickle.dumps((number, payload))))

    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            number, method, arguments = pickle.loads(await _frame(reader))
            if method:
                running[number] = asyncio.create_task(run(number, method, arguments))
            elif number in running:
                running[number].cancel()
    os._exit(0)


def failed(error: BaseException) -> bytes:
    """Return the outcome of an error."""
    frames = tuple((frame.filename, frame.lineno, frame.name, frame.line) for frame in user_frames(error))
    pickled = b""
    with contextlib.suppress(Exception):
        attempt = pickle.dumps(error)
        if isinstance(error, Exception) and type(pickle.loads(attempt)) is type(error):
            pickled = attempt
    text = "".join(traceback.format_exception_only(error)).strip()
    return pickle.dumps(Outcome(error=pickled, text=text, frames=frames))


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: in Python, or in a system call, such as the listing of a folder."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(8, "big") + message


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(8), "big"))
