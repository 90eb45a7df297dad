"""The machine as a process sees it: cores, GPUs, environment variables, malloc and the garbage collector."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from whet.processes import machine
from whet.processes.compute import computing
from whet.processes.machine import collecting_seldom, environment, free_memory_fraction, start_time


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("400000 100000\n", 4),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 8),
        ("max 100000\n", 8),
    ],
)
def test_a_container_s_limit_counts(limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.cores() == expected
    assert machine.threads_per_rank(3) == max(1, expected // 3)


def test_without_a_limit_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "missing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert machine.cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.cores() == 6


class Driver:
    """A fake of ``pynvml``."""

    NVMLError = RuntimeError

    def __init__(self, free: dict[Any, float]) -> None:
        self.free, self.open = free, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Any:
        return self.nvmlDeviceGetHandleByUUID(number)

    def nvmlDeviceGetHandleByUUID(self, name: Any) -> Any:
        if name not in self.free:
            raise self.NVMLError(f"no {name}")
        return name

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(free=self.free[handle] * 140, total=140)


def test_the_fullest_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({4: 0.75, "GPU-11aa": 0.25})
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert free_memory_fraction(("4", "GPU-11aa")) == 0.25
    assert free_memory_fraction(("4",)) == 0.75
    assert free_memory_fraction(("9",)) == 1.0, "the driver does not know it; vLLM will say so"
    assert driver.open == 0


def test_without_a_driver_all_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert free_memory_fraction(("0",)) == 1.0


def test_variables_are_restored_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_OLD", "before")
    monkeypatch.delenv("WHET_NEW", raising=False)
    with suppress(ValueError), environment({"WHET_OLD": "within", "WHET_NEW": "within"}):
        assert (os.environ["WHET_OLD"], os.environ["WHET_NEW"]) == ("within", "within")
        raise ValueError("inside")
    assert os.environ["WHET_OLD"] == "before"
    assert "WHET_NEW" not in os.environ


CODE = """
import resource, threading
from whet.processes import machine
machine.memory_gib = lambda: (8.0, {available})
if {keep}:
    machine.keep_freed_memory()
faults = []
def work():
    for _ in range(4):
        if machine.memory_is_short():
            machine.return_freed_memory()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [b"x" * (size << 20) for size in (200, 100, 40, 40)]
        del blocks
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(*faults)
"""
PAGES = 380 * 256


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
@pytest.mark.parametrize(
    ("keep", "available", "kept"),
    [(True, 2.1, True), (True, 1.9, False), (False, 2.1, False)],
    ids=["kept", "returned where memory is short", "as by default"],
)
def test_memory_that_a_second_thread_frees_is_not_faulted_in_again(keep: bool, available: float, kept: bool) -> None:
    code = CODE.format(keep=keep, available=available)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    first, *others = map(int, done.stdout.split())
    assert first > 0.9 * PAGES
    assert all(faults < 0.1 * PAGES for faults in others) == kept


def test_a_start_time_does_not_depend_on_the_system_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    here = start_time(os.getpid())
    assert here
    time.sleep(0.05)  # some of the clock's ticks, if this process has only just begun
    with subprocess.Popen(["sleep", "60"]) as later:
        assert start_time(later.pid) != here
        later.kill()
    monkeypatch.setattr(psutil, "boot_time", lambda: 0.0)  # as after the clock was set
    assert start_time(os.getpid()) == here


def test_a_process_that_has_ended_has_no_start_time() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(process.pid) == "", "it is a zombie"
    process.wait()
    assert start_time(process.pid) == ""


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize(("before", "inside"), [(700, 50_000), (100_000, 100_000), (0, 0)])
def test_the_garbage_collector_runs_seldom_while_a_run_computes(before: int, inside: int) -> None:
    gc.set_threshold(before, 7, 8)
    with suppress(ZeroDivisionError), computing():
        assert gc.get_threshold() == (inside, 7, 8)
        with collecting_seldom():
            assert gc.get_threshold() == (inside, 7, 8)
        assert gc.get_threshold() == (inside, 7, 8)
        raise ZeroDivisionError
    assert gc.get_threshold() == (before, 7, 8), "an error restores it, too"
