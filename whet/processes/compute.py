"""The single thread of a process that computes with torch.

Each thread that calls a parallel operation gets its own OpenMP team, and with two teams on the same cores every small
operation must wake sleeping threads (a decode step takes twice as long). Therefore learners and generators of this
process, digests, probes and tensor operations of the controller are jobs of ``COMPUTE``; the event loop only awaits
them.

    event loop   await compute(Batch.from_groups, ...)   await learner.update(...)      others await generator.sample()
    COMPUTE      decode, decode, from_groups, decode, [update: micro-batch, decode, decode, micro-batch, decode], decode

Who waits for whom: see ``whet.processes.threads``. Decode steps are its turns, everything else is a job. A caller waits
at most until its deadline. A job that hangs is abandoned when its owner is closed, or when the run ends.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import TypeVar, TypeVarTuple

from whet.base.errors import DeadlineError, WhetError
from whet.processes.interrupts import interruptible
from whet.processes.loop_thread import format_error
from whet.processes.machine import collecting_seldom, keep_freed_memory
from whet.processes.sentinel import endings_are_errors, watched
from whet.processes.threads import JobThread, named

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

COMPUTE = JobThread("whet-compute")
DEADLINE = 1800.0  # seconds; the same as for a learner's calls


async def compute(work: Callable[[*Ts], T], *args: *Ts, deadline: float = DEADLINE, turn: bool = False) -> T:
    """Return ``work(*args)``, run on the compute thread as a job or a ``turn``. Raises ``DeadlineError`` after
    ``deadline`` seconds."""
    future = COMPUTE.submit(work, *args, turn=turn)
    limit = asyncio.timeout(deadline)
    try:
        async with limit:
            return await asyncio.wrap_future(future)
    except TimeoutError:
        if not limit.expired():  # raised by the work itself
            raise
        raise DeadlineError(
            f"{named(work)} did not finish within its deadline of {deadline:g} s; the compute thread is busy with "
            f"{COMPUTE.doing}: find out what hangs there, or raise the deadline if the work takes that long"
        ) from None


def compute_now(work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Do the same for callers that can't await. May also be called on the compute thread."""
    return work(*args) if COMPUTE.is_current else COMPUTE.submit(work, *args).result(DEADLINE)


def run_computing(main: Coroutine[object, object, T], after: str = "", *, prepared: bool = True) -> T:
    """Run a coroutine with ``asyncio.run`` and a compute thread. Torch operations on the calling thread (for example in
    user code) run single-threaded, so that they start no second OpenMP team. ``prepared``: false where the coroutine
    hardly ever computes, so that torch, whose import takes seconds, is imported only if it does.

    Raises ``WhetError`` if user code tries to end the process. ``after`` is the advice that is printed if the process
    ends nevertheless."""
    # What fails before the coroutine begins is not followed by a warning that it was never awaited.
    with closing(main), interruptible() as interrupts, computing() if prepared else nullcontext(), watched(after):
        try:
            with endings_are_errors():
                return asyncio.run(interrupts.watch(main))
        except SystemExit as error:
            raise WhetError(f"code inside the run tried to end the process: {format_error(error)}") from error


@contextmanager
def computing() -> Iterator[None]:
    """Provide a compute thread inside the block. Torch operations on the calling thread run single-threaded, and the
    garbage collector runs seldom."""
    import torch

    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    COMPUTE.end()  # a thread that was started before is not prepared
    COMPUTE.prepare = partial(torch.set_num_threads, threads)
    try:
        with collecting_seldom():
            yield
    finally:
        COMPUTE.end()
        COMPUTE.prepare = None
        torch.set_num_threads(threads)
