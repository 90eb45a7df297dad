"""How much of a GPU is free is asked of the driver, under the machine's own names."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from whet.processes.gpus import free_share


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
    assert free_share(("4", "GPU-11aa")) == 0.25
    assert free_share(("4",)) == 0.75
    assert free_share(("9",)) == 1.0, "the driver does not know it; vLLM will say so"
    assert driver.open == 0


def test_without_a_driver_all_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert free_share(("0",)) == 1.0
