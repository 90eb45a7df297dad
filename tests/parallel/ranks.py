"""Runs a function on several ranks, each a separate process, with a deadline and without orphans.

Processes are forked from a server that has imported torch and transformers already, so that a group costs less than a
second. Results are returned by rank; an exception of a rank fails the test with its traceback.
"""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks import PROCESSES
from whet.cluster.base import RankInfo
from whet.cluster.rendezvous import LOOPBACK, Reservation


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any, deadline: float = 480.0) -> list[Any]:
    """Call ``function(rendezvous, rank, *args)`` on each rank; return the results. Function and results are pickled."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reserved = Reservation(LOOPBACK)
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / str(rank) for rank in range(ranks)]
        jobs = [(file, function, reserved.address, rank, args) for rank, file in enumerate(files)]
        processes = [PROCESSES.Process(target=_run, args=job, daemon=True) for job in jobs]
        try:
            for process in processes:
                process.start()
            _wait(processes, files, time.monotonic() + deadline)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [pickle.loads(file.read_bytes())[1] for file in files]


def _wait(processes: list[Any], files: list[Path], end: float) -> None:
    """Wait until all processes have ended. Raises ``AssertionError`` if one fails, or at the time ``end``."""
    while True:
        alive = [process for process in processes if process.is_alive()]
        for rank, (process, file) in enumerate(zip(processes, files, strict=True)):
            status, value = pickle.loads(file.read_bytes()) if file.exists() else ("", "")
            if status == "failed" or (not process.is_alive() and not file.exists()):
                raise AssertionError(f"rank {rank} ended with exit code {process.exitcode}\n{value}")
        if not alive:
            return
        if time.monotonic() > end:
            raise AssertionError(f"ranks {[processes.index(p) for p in alive]} were still running at the deadline")
        alive[0].join(0.1)


def _run(file: Path, function: Callable[..., Any], rendezvous: str, rank: int, args: tuple[Any, ...]) -> None:
    tempfile.tempdir = str(file.parent)  # a fork ends without the ends of imported packages, which would empty it
    try:
        answer = ("done", function(rendezvous, rank, *args))
    except BaseException:
        answer = ("failed", traceback.format_exc())
    staging = file.with_suffix(".part")
    staging.write_bytes(pickle.dumps(answer))
    staging.rename(file)


def info_of(rendezvous: str, rank: int, ranks: int, ranks_per_shard: int) -> RankInfo:
    return RankInfo(rank, ranks, rank // ranks_per_shard, ranks // ranks_per_shard, rendezvous)
