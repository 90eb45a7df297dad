"""The machine as a process sees it: CPU affinity, GPUs, environment variables, malloc, the garbage collector, and when
processes were started."""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from whet.base.errors import ConfigError

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's limit in cgroup v2: "QUOTA PERIOD" or "max PERIOD"

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_COLLECTED = 50_000  # new objects after which the garbage collector runs

_ENVIRONMENT_LOCK = threading.Lock()  # os.environ belongs to the whole process


def cores() -> int:
    """Return the number of available cores: the process's affinity, limited by a container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # no cgroup v2, or no limit
        return allowed
    return max(1, min(allowed, quota // period))


def start_time(process: int) -> str:
    """Return when a process was started; empty if it has ended. A process id alone is used again. Linux: in clock ticks
    since the system's start, which don't change when the system's clock is set; elsewhere in seconds since 1970."""
    if sys.platform == "linux":
        try:
            state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if state == "Z" else fields[18]
    import psutil

    try:
        running = psutil.Process(process)
        return "" if running.status() == psutil.STATUS_ZOMBIE else str(running.create_time())
    except psutil.Error:
        return ""


def threads_per_rank(ranks: int) -> int:
    """Return the number of threads for each of ``ranks`` processes on this machine."""
    return max(1, cores() // ranks)


def split_cores(learner: int | None, generator: int | None) -> tuple[list[int] | None, list[int] | None]:
    """Return disjoint lists of cores for learner and generator. If one number is None, that side gets the remaining
    cores; if both are None, neither side is bound (None)."""
    if learner is None and generator is None:
        return None, None
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("devices.learner_cores and generator_cores need Linux; leave them out")
    allowed = sorted(os.sched_getaffinity(0))[: cores()]
    learner = len(allowed) - (generator or 0) if learner is None else learner
    generator = len(allowed) - learner if generator is None else generator
    if learner + generator > len(allowed) or min(learner, generator) < 1:
        raise ConfigError(
            f"devices.learner_cores = {learner} and devices.generator_cores = {generator} are not possible: this "
            f"process may use {len(allowed)} cores, and each of the two needs at least one; lower them, or leave them "
            "out"
        )
    return allowed[:learner], allowed[len(allowed) - generator :]


def slice_for_rank(cores: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return a rank's slice of the cores: disjoint slices if there are enough cores, otherwise all cores.

    >>> slice_for_rank([4, 5, 6, 7], 1, 2)
    [6, 7]
    """
    each = len(cores) // ranks
    return list(cores[rank * each : (rank + 1) * each]) if each else list(cores)


def bind(cores: Sequence[int]) -> None:
    """Bind this thread, and threads that it starts later, to these cores."""
    os.sched_setaffinity(0, cores)


@contextmanager
def bound(cores: Sequence[int] | None) -> Iterator[None]:
    """Bind this thread to these cores inside the block; None changes nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    bind(cores)
    try:
        yield
    finally:
        bind(list(before))


def visible_gpus(names: Sequence[str], key: str) -> tuple[str, ...]:
    """Return GPUs as the CUDA_VISIBLE_DEVICES of another process names them. Numbers in ``names`` count the GPUs that
    this process sees, which may be a part of the machine's. Raises ``ConfigError``, which names ``key``, for a number
    out of range."""
    mine = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not mine:  # all GPUs, or none if a cluster hides them from the starting process: use the machine's numbers
        return tuple(names)
    beyond = next((name for name in names if name.isdecimal() and int(name) >= len(mine)), None)
    if beyond is not None:
        raise ConfigError(
            f"{key} names GPU {beyond}, but this process sees {len(mine)}, counted from 0: CUDA_VISIBLE_DEVICES="
            f"{','.join(mine)}"
        )
    return tuple(mine[int(name)] if name.isdecimal() else name for name in names)


def free_memory_fraction(names: Sequence[str]) -> float:
    """Return the smallest fraction of free memory among these GPUs; 1 without NVIDIA's driver. It asks the driver, not
    CUDA, so that a process to which Ray or Slurm shows no GPU can ask."""
    try:
        import pynvml
    except ImportError:
        return 1.0
    try:
        pynvml.nvmlInit()
        try:
            handles = [
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            ]
            memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 1.0
    return min((gpu.free / gpu.total for gpu in memory), default=1.0)


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, for processes that other libraries start with this process's
    environment."""
    with _ENVIRONMENT_LOCK:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def memory_gib() -> tuple[float, float]:
    """Return total and available memory, in GiB; a container's limit counts as the total."""
    import psutil

    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
        free = min(free, total - int(used.read_text()))
    return total / 2**30, free / 2**30


def memory_is_short() -> bool:
    """Return whether less than a quarter of the memory is available."""
    total, free = memory_gib()
    return 4 * free < total


def return_freed_memory() -> None:
    """Return the free pages inside the heap to the system, once: before a phase whose blocks have other sizes than the
    blocks of the phase before, and would not fit into its holes. The system takes up to a fifth of a training step on a
    CPU to hand them out again. Does nothing without glibc."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Have Python's garbage collector look for cycles after 50,000 new objects inside the block, instead of 700.

    Each episode in flight holds hundreds of objects. With thousands of episodes, the collector took a third of the
    controller's time to look at them again and again, and found nothing: neither episodes nor steps leave cycles that
    hold tokens or tensors. A threshold that is higher already, or 0 (off), stays."""
    before = gc.get_threshold()
    if 0 < before[0] < _COLLECTED:
        gc.set_threshold(_COLLECTED, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def keep_freed_memory() -> None:
    """Use one heap for all threads and never return freed memory to the system. Does nothing without glibc.

    By default glibc unmaps every large block when it is freed, and the system zeroes new pages: on a CPU that is a
    third of the time of a training step, which allocates and frees the same gigabytes again and again. The peak stays
    the same, but the process holds it between steps. Call it before any thread starts: threads keep their heap.

    oneDNN keeps the code that it generates for each shape, 1,024 pieces by default. The shapes of micro-batches hardly
    ever come again, so these pieces would only lie between the heap's free blocks and keep it growing."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)  # further arenas consist of 64 MiB pieces, which are returned to the system
    libc.mallopt(_M_MMAP_MAX, 0)  # allocate large blocks in the heap, too
    libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never trim the heap
