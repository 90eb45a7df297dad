"""The engine's end of the wire: takes buckets of weights, hands them to the engine's model, and reports what it saw and
what the model's layers compute with afterwards. Runs in the engine's process; knows no engine by name."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from whet.seeds import derive_seed
from whet.weights.digest import digest


class EngineModel(Protocol):
    """A model that can be loaded anew, by Hugging Face names."""

    def begin(self) -> None: ...
    def load(self, named: Iterable[tuple[str, Tensor]]) -> None: ...
    def finish(self) -> list[str]:
        """The names of what no weight came for."""
        ...

    def part(self, name: str, tensor: Tensor) -> Tensor | None:
        """What this process holds of a tensor, whose matrices several may share; None where it can't tell."""
        ...

    def columns(self, name: str, columns: list[int]) -> Tensor | None:
        """These columns of its part of a matrix, or its part of a vector, as the model computes with them; None where
        it can't tell."""
        ...


class Receiver:
    """One refit is ``begin``, any number of takes, ``finish``. Descriptions of buckets and mapped memory stay from one
    refit to the next."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self._memory: dict[int, Tensor] = {}  # slot -> mapped bytes
        self._described: dict[int, list[Any]] = {}  # bucket -> its tensors: (name, dtype, shape, offset)
        self._digests: dict[str, int] = {}
        self._kept: dict[str, tuple[list[int], Tensor]] = {}  # columns of what came, which the model is asked for later
        self._unread: list[str] = []
        self._columns = 0
        self._seed = 0

    def begin(self, columns: int, seed: int) -> None:
        """A new set of weights. ``columns`` of each matrix, chosen by ``seed``, will be read back."""
        self._columns, self._seed = columns, seed
        self._digests, self._kept, self._unread = {}, {}, []
        self.model.begin()

    def take_memory(self, bucket: int, slot: int, memory: list[Any] | None, described: list[Any] | None) -> None:
        """A bucket that lies in shared memory. ``memory`` (path, bytes) and ``described`` come when they are new."""
        if memory is not None:
            path, size = memory
            self._memory[slot] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        if described is not None:
            self._described[bucket] = described
        self._take(views(self._memory[slot], self._described[bucket]))

    def take_file(self, path: str) -> None:
        """A bucket that lies in a safetensors file."""
        from safetensors.torch import load_file

        self._take(list(load_file(path).items()))

    def _take(self, named: list[tuple[str, Tensor]]) -> None:
        own = [(name, tensor.clone()) for name, tensor in named]  # the memory is written again before the model is done
        self._digests |= digest(own)
        if self._columns:
            for name, tensor in own:
                part = self.model.part(name, tensor)
                if part is None:
                    self._unread.append(name)
                    continue
                columns = self._chosen(part.shape[1]) if part.ndim == 2 else []
                self._kept[name] = (columns, part[:, columns].clone() if columns else part)
        self.model.load(own)

    def _chosen(self, width: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, width))
        return torch.randperm(width, generator=generator)[: self._columns].sort().values.tolist()

    def finish(self) -> dict[str, Any]:
        """What came (``digests``, by name); the engine's own names of what nothing came for (``missing``); matrices and
        vectors that the model computes with and that are not what came (``wrong``); those it can't tell of
        (``unread``)."""
        missing = self.model.finish()
        wrong, unread = [], list(self._unread)
        for name, (columns, came) in self._kept.items():
            held = self.model.columns(name, columns)
            if held is None:
                unread.append(name)
            elif not torch.equal(held[: len(came)].to(came.device, came.dtype), came):
                wrong.append(name)
        self._kept = {}
        return {"digests": self._digests, "missing": missing, "wrong": wrong, "unread": unread}


def views(memory: Tensor, described: Iterable[Any]) -> list[tuple[str, Tensor]]:
    """(name, tensor) of a bucket; the tensors are views of ``memory`` [bytes] (uint8)."""
    found = []
    for name, kind, shape, offset in described:
        dtype: torch.dtype = getattr(torch, kind)
        count = dtype.itemsize * torch.Size(shape).numel()
        found.append((name, memory[offset : offset + count].view(dtype).view(shape)))
    return found
