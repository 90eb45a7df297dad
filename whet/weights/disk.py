"""Buckets of weights through files in the safetensors format: slower than shared memory, and nothing but a folder that
both sides can read."""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.weights.parcel import Layout


class Disk:
    """The sender's side. The files are removed once the engines have taken them."""

    method = "take_file"

    def __init__(self, within: Path | None = None) -> None:
        self._within = within
        self._folder: Path | None = None

    def open(self, layout: Layout) -> tuple[str, tuple[Any, ...]] | None:
        """The receiver needs to know nothing."""
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="whet-weights-", dir=self._within))
        return None

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> tuple[Any, ...]:
        """Write the tensors. Returns the arguments of ``Receiver.take_file``."""
        from safetensors.torch import save_file

        assert self._folder is not None
        path = self._folder / f"{bucket:05d}.safetensors"
        save_file(_unshared(named), path)
        (self._folder / f"{bucket - 2:05d}.safetensors").unlink(missing_ok=True)  # that one was taken
        return (str(path),)

    def sent(self) -> None:
        self.close()

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _unshared(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The format holds no tensor twice: a tied head is written as a copy."""
    seen: set[int] = set()
    found = {}
    for name, tensor in named:
        pointer = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if pointer in seen else tensor.contiguous()
        seen.add(pointer)
    return found
