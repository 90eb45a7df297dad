"""Threads are as many as the cores that a process may use, containers' limits included."""

import os
from pathlib import Path

import pytest

from whet.processes import cores


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
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores.cores() == expected
    assert cores.divided_cores(3) == max(1, expected // 3)


def test_without_a_limit_those_count_that_the_process_may_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "missing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert cores.cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores.cores() == 6
