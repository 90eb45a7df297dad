"""Buckets of weights in safetensors files: slower than shared memory, but needs only a folder that both sides can
read."""

import socket
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from whet.base.scratch import Scratch
from whet.weights.manifest import Manifest


class DiskWriter:
    """The learner's end. The files are removed once the engines have taken them."""

    def __init__(self, within: Path | None = None) -> None:
        self._within = within
        self._scratch: Scratch | None = None

    def open(self, manifest: Manifest) -> tuple[str]:
        """Return a new folder."""
        self.close()
        self._scratch = Scratch(f"weights-{socket.gethostname()}", self._within)
        return (str(self._scratch.path),)

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> int:
        from safetensors.torch import save_file

        assert self._scratch is not None
        tensors = _unshared(named)
        save_file(tensors, _file(self._scratch.path, bucket))
        _file(self._scratch.path, bucket - 2).unlink(missing_ok=True)  # the engines have taken it
        return sum(tensor.nbytes for tensor in tensors.values())

    def taken(self) -> None:
        self.close()

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None


class DiskReader:
    """The engine's end."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def read(self, manifest: Manifest, bucket: int) -> list[tuple[str, Tensor]]:
        from safetensors.torch import load_file

        return list(load_file(_file(self._folder, bucket)).items())

    def close(self) -> None:
        """The learner removes the files."""


def _file(folder: Path, bucket: int) -> Path:
    return folder / f"{bucket:05d}.safetensors"


def _unshared(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors, with a tied head as a copy, because the format stores no tensor twice."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in named:
        pointer = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if pointer in seen else tensor.contiguous()
        seen.add(pointer)
    return tensors
