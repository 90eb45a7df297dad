"""The engine's end of a refit: receives buckets of weights, loads them into the engine's model, and reports their
digests and the values that the model's layers compute with afterwards. Runs in the engine's process."""

from collections.abc import Iterable
from typing import Protocol, TypedDict

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
    """A model that can load new weights, by Hugging Face names or, for LoRA's tensors, by PEFT's."""

    def begin(self) -> None: ...
    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the weights. Their memory is overwritten once this returns."""
        ...

    def finish(self) -> list[str]:
        """Return the names of parameters without a loaded weight."""
        ...

    def shard(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return this process's part of a tensor, whose matrices several processes may share; None if that is
        unknown."""
        ...

    def read_back(self, name: str, columns: list[int]) -> Tensor | None:
        """Return these columns of its shard of a matrix, or its shard of a vector, as the model computes with them;
        None if that is unknown. Without columns, return all of it."""
        ...


class LoadableAdapter(Loadable, Protocol):
    """The LoRA adapter of a model. Its shards are as its layers store them: scaled and padded with zeros."""

    def refuses(self, names: list[str]) -> list[str]:
        """Return the modules of the named tensors to which LoRA can't be applied."""
        ...


class RankModel(Loadable, Protocol):
    """The model of an engine, or one rank's part of it."""

    @property
    def rank(self) -> int:
        """This process's index among the processes that share the model, from 0."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its computations."""
        ...

    @property
    def rounding(self) -> float:
        """The relative error that a matrix element may have when it is read back; 0: none."""
        ...

    def adapter(self, rank: int, alpha: float) -> LoadableAdapter:
        """Return LoRA over the loaded weights."""
        ...


class Report(TypedDict):
    """The final report of one rank."""

    digests: dict[str, int]  # digests of received tensors, by name
    missing: list[str]  # the engine's names of parameters without a new weight
    wrong: list[str]  # tensors whose values in the model differ from the received ones
    unverified: list[str]  # tensors that the engine can't read back


class Receiver:
    """One refit is ``begin``, any number of ``take``, ``finish``. The manifest and the connection to the sender are
    kept between refits. Arguments and results are plain data, which any engine's messages can carry."""

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self._target: Loadable = model  # the model or adapter that is loaded
        self._manifest: Manifest = ()
        self._reader: Reader | None = None
        self._digests: dict[str, int] = {}
        self._expected: dict[str, tuple[list[int], Tensor]] = {}  # columns of received tensors, to compare later
        self._unverified: list[str] = []
        self._columns = self._seed = 0
        self._drawn: dict[int, list[int]] = {}  # columns, by the width of a matrix

    def machine(self) -> str:
        """Return the name of the machine whose memory this process shares."""
        return machine()

    def begin(
        self, columns: int, seed: int, manifest: str | None, adapter: tuple[int, float] | None = None
    ) -> list[str]:
        """Begin a new set of weights. ``columns`` columns of each matrix, chosen by ``seed``, will be read back.
        ``manifest``: the text of a new manifest, or None if it is unchanged. ``adapter``: only LoRA's tensors follow,
        of this rank and alpha; return the modules to which they can't be applied."""
        self._columns, self._seed = columns, seed
        self._digests, self._expected, self._unverified, self._drawn = {}, {}, [], {}
        if manifest is not None:
            self._manifest = from_text(manifest)
        self._target, refused = self.model, list[str]()
        if adapter is not None:
            self._target = lora = self.model.adapter(*adapter)
            refused = lora.refuses([entry.name for bucket in self._manifest for entry in bucket])
        self._target.begin()
        return refused

    def connect(self, transport: TransportName, connection: tuple[object, ...], first_rank: int) -> None:
        """Connect to the sender. ``first_rank``: the index of this engine's first rank among all reading processes,
        from 1."""
        if self._reader is not None:
            self._reader.close()  # releases its memory before the new one is mapped
        self._reader = None
        self._reader = connect(transport, connection, self.model.device, first_rank + self.model.rank)

    def take(self, bucket: int) -> None:
        """Load a bucket from the transport's memory, which is overwritten once this returns."""
        if self._reader is None:
            raise RefitError("weights were sent to an engine that is not connected to the learner")
        named = self._reader.read(self._manifest, bucket)
        if self._columns:
            self._digests |= digest(named)
            for name, tensor in named:
                self._keep(name, tensor)
        self._target.load(named)
        settle(self.model.device)

    def _keep(self, name: str, tensor: Tensor) -> None:
        shard = self._target.shard(name, tensor)
        if shard is None:
            self._unverified.append(name)
            return
        columns = self._chosen(shard.shape[1]) if shard.ndim == 2 and self._target is self.model else []
        self._expected[name] = (columns, shard[:, columns] if columns else shard.clone())

    def _chosen(self, width: int) -> list[int]:
        if width not in self._drawn:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, width))
            self._drawn[width] = torch.randperm(width, generator=generator)[: self._columns].sort().values.tolist()
        return self._drawn[width]

    def finish(self) -> Report:
        """End the set, and read back."""
        missing = self._target.finish()
        wrong, unverified, rounding = [], list(self._unverified), self.model.rounding
        for name, (columns, expected) in self._expected.items():
            actual = self._target.read_back(name, columns)
            if actual is None:
                unverified.append(name)
                continue
            if actual.ndim:
                actual = actual[: len(expected)]
            actual = actual.to(expected.device, expected.dtype)
            same = actual.shape == expected.shape
            if not same or not torch.allclose(actual, expected, rtol=rounding if columns else 0.0, atol=0.0):
                wrong.append(name)
        self._expected, self._target = {}, self.model
        return {"digests": self._digests, "missing": missing, "wrong": wrong, "unverified": unverified}
