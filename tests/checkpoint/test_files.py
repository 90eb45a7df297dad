"""Files are there completely or not at all; tensors come back as they were, however they lay in memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from whet.checkpoint.files import atomic_write_bytes, atomic_write_json, atomic_write_text, load_tensors, save_tensors
from whet.errors import WhetError


def test_text_bytes_and_json_are_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    atomic_write_text(path, "grüße")
    assert path.read_text(encoding="utf-8") == "grüße"
    atomic_write_bytes(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    atomic_write_json(path, {"lr": 1e-6})
    assert json.loads(path.read_text()) == {"lr": 1e-6}
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_json_with_a_number_that_is_not_finite_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write_json(path, 1)
    with pytest.raises(ValueError, match="JSON"):
        atomic_write_json(path, float("nan"))
    assert path.read_text() == "1\n"


def test_tensors_come_back_bit_for_bit_whatever_their_layout(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "plain": base,
        "transposed": base.T,
        "tied": base,
        "row": base[2],
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(3),
        "half": base.bfloat16(),
        "bits": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "negative_zero": torch.tensor([-0.0, float("nan")]),
        "trained": torch.nn.Parameter(base.clone()),
    }
    save_tensors(tmp_path / "a.safetensors", tensors)
    found = load_tensors(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(
            found[name].flatten().view(torch.uint8), tensor.detach().contiguous().flatten().view(torch.uint8)
        )
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_missing_or_damaged_tensor_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(WhetError, match=r"a\.safetensors"):
        load_tensors(path)
    save_tensors(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(WhetError, match=r"a\.safetensors"):
        load_tensors(path)


def test_light_code_does_not_pay_for_torch() -> None:
    script = (
        "import sys, whet.checkpoint.files, whet.checkpoint.config, whet.checkpoint.crash_points\n"
        "import whet.checkpoint.lock, whet.checkpoint.store, whet.checkpoint.export\n"
        "print([name for name in ('torch', 'transformers', 'safetensors', 'peft') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout == "[]\n"
