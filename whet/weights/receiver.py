"""The engine's end of the wire: takes buckets of weights, hands them to the engine's model, and reports what it saw and
what the model's layers compute with afterwards. Runs in the engine's process; knows no engine by name."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from whet.errors import RefitError
from whet.seeds import derive_seed
from whet.weights.digest import digest
from whet.weights.memory import Handle, open_shared, settle
from whet.weights.parcel import Layout, views

if TYPE_CHECKING:
    from whet.weights.collective import Broadcast
    from whet.weights.cuda_ipc import Handles


class Loadable(Protocol):
    """What can be loaded anew, by Hugging Face names or, of LoRA's tensors, by PEFT's."""

    def begin(self) -> None: ...
    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Some of the weights. Their memory is written over once this returns."""
        ...

    def finish(self) -> list[str]:
        """The names of what no weight came for."""
        ...

    def part(self, name: str, tensor: Tensor) -> Tensor | None:
        """What this process is to hold of a tensor, whose matrices several may share; None where it can't tell."""
        ...

    def columns(self, name: str, columns: list[int]) -> Tensor | None:
        """These columns of its part of a matrix, or its part of a vector, as the model computes with them; None where
        it can't tell. Without columns, all of it."""
        ...


class LoadableAdapter(Loadable, Protocol):
    """The LoRA adapter of a model. Its parts are as its layers hold them: scaled, filled up with zeros."""

    def refuses(self, names: list[str]) -> list[str]:
        """Of tensors to come, the modules that it can't apply LoRA to."""
        ...


class EngineModel(Loadable, Protocol):
    """A model."""

    @property
    def rank(self) -> int:
        """Which of the processes that share the model this one is, from 0."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def adapter(self, rank: int, alpha: float) -> LoadableAdapter:
        """LoRA over the weights that are there."""
        ...


class Receiver:
    """One refit is ``begin``, any number of takes, ``finish``. How weights are packed, mapped memory and the way to the
    sender stay from one refit to the next."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self._into: Loadable = model  # what is being loaded
        self._layout: Layout = []
        self._memory: list[Tensor] = []  # [bytes] of each slot
        self._wire: Broadcast | None = None
        self._digests: dict[str, int] = {}
        self._kept: dict[str, tuple[list[int], Tensor]] = {}  # columns of what came, which the model is asked for later
        self._unread: list[str] = []
        self._columns = 0
        self._drawn: dict[int, list[int]] = {}  # columns, by the width of a matrix
        self._seed = 0
        self._rank = 1

    def begin(
        self,
        columns: int,
        seed: int,
        layout: Layout | None,
        first_rank: int = 1,
        adapter: tuple[int, float] | None = None,
    ) -> list[str]:
        """A new set of weights. ``columns`` of each matrix, chosen by ``seed``, will be read back. ``layout`` says how
        they are packed, where that is new; ``first_rank`` which of all processes that take them is this engine's first,
        from 1. ``adapter``: LoRA's tensors alone are to come, of this rank and alpha; the modules are returned that it
        can't be applied to."""
        self._columns, self._seed, self._rank = columns, seed, first_rank + self.model.rank
        self._digests, self._kept, self._unread, self._drawn = {}, {}, [], {}
        if layout is not None:
            self._layout = layout
        self._into, refused = self.model, list[str]()
        if adapter is not None:
            self._into = own = self.model.adapter(*adapter)
            refused = own.refuses([name for bucket in self._layout for name, *_ in bucket])
        self._into.begin()
        return refused

    def map_memory(self, handles: list[Handle], size: int) -> None:
        """What buckets will lie in from now on: memory of the sender's, ``size`` bytes behind each handle."""
        self._map(handles, size, torch.device("cpu"))

    def map_device_memory(self, handles: "Handles", size: int) -> None:
        """The same on this process's device. Raises ``RefitError`` where no rank of the learner is on it."""
        from whet.weights import cuda_ipc

        self._map(cuda_ipc.own(handles, self.model.device), size, self.model.device)

    def _map(self, handles: list[Handle], size: int, device: torch.device) -> None:
        self._memory = []  # let go of what was there first
        try:
            self._memory = [open_shared(handle, size, device) for handle in handles]
        except (RuntimeError, OSError) as error:  # torch's own errors, CUDA's among them, are of the first kind
            raise RefitError(
                f"the engine could not open the learner's memory ({size} bytes on {device}): {error}. Its processes "
                "must be on one machine and see each other, also where they run in containers; else set "
                "weights.transport=collective or disk"
            ) from error

    def take_memory(self, bucket: int, slot: int) -> None:
        """A bucket that lies in shared memory, where it is read; it is written over once this returns."""
        memory = self._memory[slot]
        self._take(views(memory, self._layout[bucket]))
        settle(memory.device)

    def join(self, host: str, port: int, ranks: int, backend: str, deadline: float) -> None:
        """Meet the sender, to whose broadcasts buckets will come from now on."""
        from whet.weights import collective

        if self._wire is not None:
            self._wire.close()
        self._wire = collective.join(host, port, self._rank, ranks, backend, deadline)

    def take_broadcast(self, bucket: int) -> None:
        """A bucket that the sender is broadcasting."""
        from whet.weights.collective import receive

        if self._wire is None:
            raise RefitError("a bucket of weights was to be broadcast to an engine that has not met the learner")
        self._take(receive(self._wire, bucket, self._layout))

    def take_file(self, path: str) -> None:
        """A bucket that lies in a safetensors file."""
        from safetensors.torch import load_file

        self._take(list(load_file(path).items()))

    def _take(self, named: list[tuple[str, Tensor]]) -> None:
        if self._columns:
            self._digests |= digest(named)
            for name, tensor in named:
                self._keep(name, tensor)
        self._into.load(named)

    def _keep(self, name: str, tensor: Tensor) -> None:
        part = self._into.part(name, tensor)
        if part is None:
            self._unread.append(name)
            return
        columns = self._chosen(part.shape[1]) if part.ndim == 2 and self._into is self.model else []
        self._kept[name] = (columns, part[:, columns] if columns else part.clone())

    def _chosen(self, width: int) -> list[int]:
        if width not in self._drawn:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, width))
            self._drawn[width] = torch.randperm(width, generator=generator)[: self._columns].sort().values.tolist()
        return self._drawn[width]

    def finish(self) -> dict[str, Any]:
        """What came (``digests``, by name); the engine's own names of what nothing came for (``missing``); matrices and
        vectors that the model computes with and that are not what came (``wrong``); those it can't tell of
        (``unread``)."""
        missing = self._into.finish()
        wrong, unread = [], list(self._unread)
        for name, (columns, came) in self._kept.items():
            held = self._into.columns(name, columns)
            if held is None:
                unread.append(name)
            elif not torch.equal(held[: len(came)].to(came.device, came.dtype), came):
                wrong.append(name)
        self._kept, self._into = {}, self.model
        return {"digests": self._digests, "missing": missing, "wrong": wrong, "unread": unread}
