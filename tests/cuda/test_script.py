"""The script for the first hour on a GPU runs on a CPU, with tiny sizes, so that it is never the bug."""

import json
from pathlib import Path

import pytest

from tests.cuda.checks import gpu, names

SLOW = {"A9"}  # which starts a process


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for part in "ABC" for n in names(part)],
)
def test_a_check_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    found = gpu.run([name], gpu.Setting(small=True, folder=tmp_path), out)
    assert [row for row in found[name] if row.ok is False] == []
    assert [row["what"] for row in json.loads(out.read_text())[name]][-1] == "seconds"
    assert len(found[name]) > 1


def test_a_check_that_fails_costs_no_other_ones_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(setting: gpu.Setting):
        yield gpu.Row("half-way", 1.0)
        raise RuntimeError("out of memory")

    monkeypatch.setitem(gpu.CHECKS, "Z1", fails)
    monkeypatch.setitem(gpu.CHECKS, "Z2", lambda setting: iter([gpu.within("it", 3.0, 1, 2, setting)]))
    found = gpu.run(["Z1", "Z2", "Z2"], gpu.Setting(small=True), tmp_path / "gpu.json", until=1e9)
    assert [row.what for row in found["Z1"]] == ["half-way", "failed", "seconds"]
    assert "out of memory" in str(found["Z1"][1].got)
    assert found["Z2"][0].expected == "1 to 2"
    late = gpu.run(["Z2"], gpu.Setting(small=True), None, until=-1.0)
    assert late["Z2"][0].what == "not begun"
