"""The folder through which servers get new weights: safetensors files, next to the model's config and tokenizer. They
are written once for all servers, by the first engine of a refit, the writer."""

import asyncio
import importlib
import json
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.base.scratch import Scratch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class WeightFolder:
    """Takes buckets of weights as the model of an engine does (``whet.weights.receiver.RankModel``). What servers
    compute with can't be read back: the proofs are the digest of what came, and the probe."""

    rank = 0
    device = torch.device("cpu")
    rounding = 0.0

    def __init__(
        self, within: Path | None, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None"
    ) -> None:
        self._within, self._model, self._tokenizer = within, model, tokenizer
        self._scratch: Scratch | None = None
        self._receivers: dict[str, Any] = {}
        self._version = -1
        self._files: dict[str, list[str]] = {}  # the names of the tensors in each file
        self._bytes = 0
        self._written: asyncio.Future[Path] | None = None
        self.writer: object = None

    def enter(self, engine: object, version: int) -> None:
        """Register an engine for a refit. The first one is the writer."""
        if self.writer is None:
            self.writer, self._version = engine, version
            self._written = asyncio.get_running_loop().create_future()

    def leave(self, engine: object) -> None:
        """End a refit of this engine; others that still wait for the writer's files are cancelled."""
        if self.writer is engine:
            self.writer = None
            self._settle(complete=False)

    async def call(self, target: str, method: str, *args: object) -> object:
        """Call a method of the receiver ``module:Class``, which reads the buckets for the writer."""
        if target not in self._receivers:
            module, _, name = target.partition(":")
            self._receivers[target] = getattr(importlib.import_module(module), name)(self)
        try:
            answer = await asyncio.to_thread(getattr(self._receivers[target], method), *args)
        except BaseException:
            self._settle(complete=False)
            raise
        if method == "finish":
            self._settle(complete=True)
        return answer

    def _settle(self, *, complete: bool) -> None:
        """Wake the engines that wait for the files."""
        if self._written is None or self._written.done():
            return
        if complete:
            self._written.set_result(self.path)
        else:
            self._written.cancel()

    async def written(self) -> Path:
        """Return the folder once all weights are in it."""
        assert self._written is not None
        await asyncio.wait({self._written})
        if self._written.cancelled():
            raise RefitError("the weights for the servers could not be written to their folder")
        return self._written.result()

    @property
    def path(self) -> Path:
        assert self._scratch is not None
        return self._scratch.path / f"version-{self._version}"

    # As a model

    def begin(self) -> None:
        """Create the folder of a version, and remove older ones, which no server reads any more."""
        self.close()
        self._scratch = Scratch(f"servers-{socket.gethostname()}", self._within)
        self._scratch.path.chmod(0o755)  # servers of other users read it
        self._model.save_pretrained(self.path)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(self.path)
        self._files, self._bytes = {}, 0

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in named}
        file = f"model-{len(self._files) + 1:05d}.safetensors"
        save_file(tensors, self.path / file, metadata={"format": "pt"})
        self._files[file] = list(tensors)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self) -> list[str]:
        index = {
            "metadata": {"total_size": self._bytes},
            "weight_map": {name: file for file, names in self._files.items() for name in names},
        }
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return []

    def shard(self, name: str, tensor: Tensor) -> None:
        return None

    def read_back(self, name: str, columns: list[int]) -> None:
        return None

    def close(self) -> None:
        """Remove the files."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch.path, ignore_errors=True)
            self._scratch.remove()
            self._scratch = None
