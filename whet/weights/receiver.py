"""The engine's end of a refit: takes buckets of weights, hands them to the engine's model, and reports what it saw and
what the model's layers compute with afterwards. Runs in the engine's process; knows no engine by name."""

from collections.abc import Iterable
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.base.seeds import derive_seed
from whet.weights.config import TransportName
from whet.weights.digest import digest
from whet.weights.manifest import Manifest, from_text
from whet.weights.shared_memory import machine, settle
from whet.weights.transport import Reader, connect


class Loadable(Protocol):
    """A model that can be loaded anew, by Hugging Face names or, of LoRA's tensors, by PEFT's."""

    def begin(self) -> None: ...
    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take some of the weights. Their memory is written over once this returns."""
        ...

    def finish(self) -> list[str]:
        """Return the names of what no weight came for."""
        ...

    def shard(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what this process is to hold of a tensor, whose matrices several may share; None where it can't
        tell."""
        ...

    def read_back(self, name: str, columns: list[int]) -> Tensor | None:
        """Return these columns of its shard of a matrix, or its shard of a vector, as the model computes with them;
        None where it can't tell. Without columns, all of it."""
        ...


class LoadableAdapter(Loadable, Protocol):
    """The LoRA adapter of a model. Its shards are as its layers hold them: scaled, filled up with zeros."""

    def refuses(self, names: list[str]) -> list[str]:
        """Return the modules, of tensors to come, that it can't apply LoRA to."""
        ...


class RankModel(Loadable, Protocol):
    """The model of an engine, or what one of its ranks has of it."""

    @property
    def rank(self) -> int:
        """This process's number among those that share the model, from 0."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        ...

    @property
    def rounding(self) -> float:
        """The share of itself by which a number of a matrix may differ when it is read back; 0: none."""
        ...

    def adapter(self, rank: int, alpha: float) -> LoadableAdapter:
        """Return LoRA over the weights that are there."""
        ...


class Report(TypedDict):
    """The report of one rank at the end."""

    digests: dict[str, int]  # of what came, by name
    missing: list[str]  # the engine's own names of what nothing came for
    wrong: list[str]  # matrices and vectors that the model computes with and that are not what came
    unread: list[str]  # those that it can't tell of


class Receiver:
    """One refit is ``begin``, any number of ``take``, ``finish``. The manifest and the way to the sender stay from one
    refit to the next. Arguments and results are plain data, which any engine's messages can carry."""

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self._into: Loadable = model  # what is being loaded
        self._manifest: Manifest = ()
        self._reader: Reader | None = None
        self._digests: dict[str, int] = {}
        self._kept: dict[str, tuple[list[int], Tensor]] = {}  # columns of what came, which the model is asked for later
        self._unread: list[str] = []
        self._columns = self._seed = 0
        self._drawn: dict[int, list[int]] = {}  # columns, by the width of a matrix

    def machine(self) -> str:
        """Return the name of the machine whose memory this process shares."""
        return machine()

    def begin(
        self, columns: int, seed: int, manifest: str | None, adapter: tuple[int, float] | None = None
    ) -> list[str]:
        """Begin a new set of weights. ``columns`` of each matrix, chosen by ``seed``, will be read back. ``manifest``:
        where it is new, as ``to_text`` writes it. ``adapter``: LoRA's tensors alone are to come, of this rank and
        alpha; the modules are returned that it can't be applied to."""
        self._columns, self._seed = columns, seed
        self._digests, self._kept, self._unread, self._drawn = {}, {}, [], {}
        if manifest is not None:
            self._manifest = from_text(manifest)
        self._into, refused = self.model, list[str]()
        if adapter is not None:
            self._into = own = self.model.adapter(*adapter)
            refused = own.refuses([entry.name for bucket in self._manifest for entry in bucket])
        self._into.begin()
        return refused

    def connect(self, transport: TransportName, connection: tuple[Any, ...], first_rank: int) -> None:
        """Connect to the sender. ``first_rank``: which of all processes that read is this engine's first, from 1."""
        if self._reader is not None:
            self._reader.close()  # let go of what was there first
        self._reader = None
        self._reader = connect(transport, connection, self.model.device, first_rank + self.model.rank)

    def take(self, bucket: int) -> None:
        """Load a bucket from where it lies; it is written over once this returns."""
        if self._reader is None:
            raise RefitError("weights were sent to an engine that is not connected to the learner")
        named = self._reader.read(self._manifest, bucket)
        if self._columns:
            self._digests |= digest(named)
            for name, tensor in named:
                self._keep(name, tensor)
        self._into.load(named)
        settle(self.model.device)

    def _keep(self, name: str, tensor: Tensor) -> None:
        shard = self._into.shard(name, tensor)
        if shard is None:
            self._unread.append(name)
            return
        columns = self._chosen(shard.shape[1]) if shard.ndim == 2 and self._into is self.model else []
        self._kept[name] = (columns, shard[:, columns] if columns else shard.clone())

    def _chosen(self, width: int) -> list[int]:
        if width not in self._drawn:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, width))
            self._drawn[width] = torch.randperm(width, generator=generator)[: self._columns].sort().values.tolist()
        return self._drawn[width]

    def finish(self) -> Report:
        """End the set, and read back."""
        missing = self._into.finish()
        wrong, unread, rounding = [], list(self._unread), self.model.rounding
        for name, (columns, came) in self._kept.items():
            held = self._into.read_back(name, columns)
            if held is None:
                unread.append(name)
                continue
            held = held[: len(came)].to(came.device, came.dtype)
            if held.shape != came.shape or not torch.allclose(held, came, rtol=rounding if columns else 0.0, atol=0.0):
                wrong.append(name)
        self._kept, self._into = {}, self.model
        return {"digests": self._digests, "missing": missing, "wrong": wrong, "unread": unread}
