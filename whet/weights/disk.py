"""Buckets of weights in safetensors files: slower than shared memory, but needs only a folder that both sides can
read."""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from whet.weights.manifest import Manifest


class DiskWriter:
    """The learner's end. The files are removed once the engines have taken them."""

    def __init__(self, within: Path | None = None) -> None:
        self._within = within
        self._folder: Path | None = None

    def open(self, manifest: Manifest) -> tuple[str]:
        """Return a new folder."""
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="whet-weights-", dir=self._within))
        return (str(self._folder),)

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> None:
        from safetensors.torch import save_file

        assert self._folder is not None
        save_file(_unshared(named), _file(self._folder, bucket))
        _file(self._folder, bucket - 2).unlink(missing_ok=True)  # the engines have taken it

    def taken(self) -> None:
        self.close()

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


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
