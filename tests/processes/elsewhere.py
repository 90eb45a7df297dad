"""Records torch operations outside the compute thread."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

_NO_WORK = {"empty", "detach", "alias", "view", "select", "slice", "set_", "lift_fresh", "_local_scalar_dense"}
"""Operations that only describe tensors, or read one number."""


class _Counting(TorchDispatchMode):
    """Counts this thread's operations by the thread's name."""

    def __init__(self, found: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _NO_WORK:
            self._found[threading.current_thread().name, name] += 1
        return func(*args, **kwargs or {})


@contextmanager
def operations_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[str, str]]]:
    """Record torch operations, by thread and name, of all threads except the compute thread."""
    found: Counter[tuple[str, str]] = Counter()
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        if thread.name == "whet-compute":
            run(thread)
            return
        with _Counting(found):
            run(thread)

    with monkeypatch.context() as patch, _Counting(found):
        patch.setattr(threading.Thread, "run", watched)
        yield found
