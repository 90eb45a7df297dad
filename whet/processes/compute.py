"""The one thread of a process that computes with torch.

Why one: each thread that calls a parallel operation gets an OpenMP team of its own, and with two teams on the same
cores every small operation pays for waking sleeping threads (a decode step takes twice as long). So learners and
generators of this process, digests, probes and whatever the controller does with tensors are jobs of ``COMPUTE``; the
event loop only awaits them.

    event loop   await compute(Batch.from_groups, ...)   await learner.update(...)      others await generator.sample()
    COMPUTE      decode, decode, from_groups, decode, [update: micro-batch, decode, decode, micro-batch, decode], decode

Who waits for whom: see ``whet.processes.threads``. Decode steps are its turns, everything else is a job. A caller waits
no longer than its deadline. A job that hangs is left behind when its owner is closed, or when the run ends.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from whet.base.errors import DeadlineError, WhetError
from whet.processes.loop_thread import described
from whet.processes.malloc import keep_freed_memory
from whet.processes.sentinel import endings_are_errors, watched
from whet.processes.threads import JobThread, named

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

COMPUTE = JobThread("whet-compute")
DEADLINE = 1800.0  # seconds; as long as a learner's calls may take


async def compute(work: Callable[[*Ts], T], *args: *Ts, deadline: float = DEADLINE, turn: bool = False) -> T:
    """Return ``work(*args)``, run on the compute thread as a job or a ``turn``. Raises ``DeadlineError`` after
    ``deadline`` seconds."""
    future = COMPUTE.submit(work, *args, turn=turn)
    limit = asyncio.timeout(deadline)
    try:
        async with limit:
            return await asyncio.wrap_future(future)
    except TimeoutError:
        if not limit.expired():  # the work's own
            raise
        raise DeadlineError(
            f"{named(work)} did not finish within its deadline of {deadline:g} s; the compute thread is busy with "
            f"{COMPUTE.doing}: look for what hangs there, or raise the deadline if the work is that long"
        ) from None


def compute_now(work: Callable[[*Ts], T], *args: *Ts) -> T:
    """The same where nobody can await it. May be called on the compute thread, too."""
    return work(*args) if COMPUTE.is_current else COMPUTE.submit(work, *args).result(DEADLINE)


def run_computing(main: Coroutine[Any, Any, T], after: str = "") -> T:
    """``asyncio.run`` for what computes: with a compute thread that ends with it. What this thread itself does with
    torch meanwhile (in user code, say) runs on one thread, so that it never makes a second team.

    User code may not end the process: raises ``WhetError`` where some tries to. ``after`` is what a user is told to do
    where the process ends all the same."""
    with computing():
        try:
            with endings_are_errors():
                return asyncio.run(_watched(main, after))
        except SystemExit as error:
            raise WhetError(f"some code of the run tried to end the process: {described(error)}") from error


@contextmanager
def computing() -> Iterator[None]:
    """Give the process a compute thread for the time inside. What the calling thread does with torch meanwhile runs on
    one thread."""
    import torch

    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    COMPUTE.end()  # one that was started before has not been prepared
    COMPUTE.prepare = partial(torch.set_num_threads, threads)
    try:
        yield
    finally:
        COMPUTE.end()
        COMPUTE.prepare = None
        torch.set_num_threads(threads)


async def _watched(main: Coroutine[Any, Any, T], after: str) -> T:
    with watched(after):  # here, because by now the loop has a handler for interrupts
        return await main
