"""One call of workers, and the connection to each of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from whet.processes.threads import JobThread

T = TypeVar("T")

_TURN = 10.0  # seconds that a shard's message waits for the one before it


class RemoteTraceback(Exception):
    """The cause of an exception from another process: the place and the traceback there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text, self.where = text, "another process"

    def __str__(self) -> str:
        return f"in {self.where}\n{self.text}"


class Call:
    """A method's name and its arguments, which are serialised once for all ranks that get them. ``of_shard``: only the
    first rank of a shard sends its result. Calls with the same ``turn`` are serialised and sent one after the other, so
    that this process never holds the messages of all shards; a rank that does not take its message in time does not
    keep the others from theirs."""

    def __init__(
        self,
        method: str,
        args: tuple[object, ...],
        ranks: int,
        of_shard: bool = False,
        turn: threading.Semaphore | None = None,
    ) -> None:
        self.method, self.args, self.of_shard = method, args, of_shard
        self._lock, self._turn, self._left = threading.Lock(), turn or threading.Semaphore(), ranks
        self._packed: Any = None
        self._in_turn = False

    @contextmanager
    def packed(self, pack: Callable[[str, tuple[object, ...], bool], T]) -> Iterator[T]:
        """Yield ``pack(method, args, of_shard)``, computed by the first caller, until it is sent; the last rank drops
        it. All ranks have the same ``pack``."""
        with self._lock:
            if self._packed is None:
                self._in_turn = self._turn.acquire(timeout=_TURN)
                try:
                    self._packed = pack(self.method, self.args, self.of_shard)
                except BaseException:
                    self._end_turn()
                    raise
            packed: T = self._packed
        try:
            yield packed
        finally:
            del packed  # before the next shard's turn
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._packed = None
                    self._end_turn()

    def _end_turn(self) -> None:
        if self._in_turn:
            self._in_turn = False
            self._turn.release()


class Link(Protocol):
    """The connection to one worker. One thread builds and calls; any thread may call ``end`` at any time."""

    @property
    def thread(self) -> JobThread | None:
        """A shared thread that builds and calls; None: a separate thread."""
        ...

    @property
    def where(self) -> str:
        """The worker's process, for messages; empty for this process."""
        ...

    def build(self) -> None:
        """Return when the worker is built. Raises the error of its constructor."""
        ...

    def call(self, call: Call) -> object:
        """Return the result. Raises the worker's exception, or ``WorkerError`` if it died."""
        ...

    def end(self) -> None:
        """Return when the worker has ended. Must work while a call is in progress."""
        ...


def call_method(worker: object, method: str, args: tuple[object, ...]) -> object:
    """Return the result of a method of the worker or of one of its attributes (``state.save``); None for a ``close``
    that it doesn't have."""
    if method == "close" and not hasattr(worker, "close"):
        return None
    return attrgetter(method)(worker)(*args)
