"""Files that are there completely or not at all: text, JSON and tensors. Imports torch only where tensors are meant."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import WhetError
from whet.metrics.atomic import sync_folder, write_atomically

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write beside ``path``, flush to the disk, rename over ``path``, flush the rename. Makes missing folders."""
    write_atomically(path, data)


def atomic_write_text(path: Path, text: str) -> None:
    """As ``atomic_write_bytes``, in UTF-8."""
    write_atomically(path, text.encode())


def atomic_write_json(path: Path, value: Any) -> None:
    """As ``atomic_write_bytes``. Raises ``ValueError`` for numbers that are not finite: JSON has none."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def save_tensors(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
    """A safetensors file, atomically. Tensors may be on any device, strided, or share memory: each is written whole."""
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != own.nbytes:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        plain[name] = own
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(plain, staging, {"format": "pt"})
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        staging.chmod(0o644)
        staging.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def load_tensors(path: Path, device: "str | torch.device" = "cpu") -> "dict[str, Tensor]":
    """The tensors of a safetensors file, by name. Raises ``WhetError`` where the file is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=str(device))
    except (OSError, ValueError, SafetensorError) as error:
        raise WhetError(f"{path} can't be read as safetensors: {error}. Load another checkpoint") from error
