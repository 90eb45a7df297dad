"""Correctness on a GPU: part A of ``benchmarks/gpu.py``, each check a test. Alone: ``python -m pytest -m cuda``."""

from pathlib import Path

import pytest
import torch

from tests.cuda.checks import gpu, names

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", names("A"))
def test_a_gpu_gives_what_is_expected(name: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    found = gpu.run([name], gpu.Setting(folder=tmp_path), tmp_path / "gpu.json")
    assert [row for row in found[name] if row.ok is False] == []
