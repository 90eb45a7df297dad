"""Buckets of weights through memory that learner and engines share: of the CPU, where the learner's first rank writes
(``shared_memory``), or of GPUs (``cuda_ipc``), where every rank of the learner writes all of a bucket on its own GPU
and the engine's rank there reads it, so that no byte leaves a GPU but what the learner's ranks gather. Two buffers take
turns: one is filled while engines load from the other. They have no name in any file system, so nothing is left over.

Who waits for whom: the first rank answers when all ranks have written a bucket (``Sender`` sees to it), so that every
engine's rank finds it complete.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from whet.base.errors import ConfigError, RefitError
from whet.parallel.mesh import Ranks, device_id
from whet.weights.manifest import Manifest, fill, largest_bucket, views
from whet.weights.shared_memory import Handle, machine, open_shared, settle, share

BUFFERS = 2
Handles = dict[str, list[Handle]]
"""Of the buffers on each device, by ``device_id``."""


class BufferWriter:
    """The learner's end, on each rank that writes; ``ranks`` are None where only one does."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.device, self._ranks = device, ranks
        self._manifest: Manifest = ()
        self._memory: list[Tensor] = []
        self._before: list[Tensor] = []  # which the engines hold until they have opened the newer ones

    def open(self, manifest: Manifest) -> tuple[Handles, int] | None:
        """Make room for the largest bucket. Returns the handles and the size of the buffers where they are new."""
        self._manifest = manifest
        if self._ranks is None:
            handles = self._make_room()
            return None if handles is None else ({device_id(self.device): handles}, self._memory[0].numel())
        with self._ranks.together("making room for weights"):
            handles = self._make_room()
        if handles is None:  # on all of them: they have the same manifests
            return None
        everywhere = self._ranks.all((machine(), device_id(self.device), handles))
        machines = {where for where, _, _ in everywhere}
        if len(machines) > 1:
            raise ConfigError(
                "weights.transport=cuda_ipc shares the memory of one machine's GPUs, and the learner's ranks are on "
                f"{len(machines)} machines; set weights.transport=collective"
            )
        return {device: theirs for _, device, theirs in everywhere}, self._memory[0].numel()

    def _make_room(self) -> list[Handle] | None:
        size = largest_bucket(self._manifest)
        if self._memory and size <= self._memory[0].numel():
            return None
        self._before, self._memory = self._memory, []
        made = [share(size, self.device) for _ in range(BUFFERS)]
        self._memory = [memory for memory, _ in made]
        return [handle for _, handle in made]

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors. A buffer is written again only after the engines have taken the bucket before."""
        fill(self._memory[bucket % len(self._memory)], self._manifest[bucket], named)
        settle(self.device)

    def taken(self) -> None:
        self._before = []

    def close(self) -> None:
        self._memory, self._before = [], []


class BufferReader:
    """The engine's end: maps the buffers on ``device``, of ``size`` bytes each. Raises ``RefitError`` where no rank of
    the learner writes on it."""

    def __init__(self, device: torch.device, handles: Handles, size: int) -> None:
        own = handles.get(device_id(device))
        if own is None:
            raise RefitError(
                f"a rank of the engine computes on {device} ({device_id(device)}), where no rank of the learner is: "
                f"these are on {', '.join(handles)}. With weights.transport=cuda_ipc, generator.devices has to name "
                "GPUs of the learner's; else set weights.transport=collective or shared_memory"
            )
        try:
            self._memory = [open_shared(handle, size, device) for handle in own]
        except (RuntimeError, OSError) as error:  # torch's own errors, CUDA's among them, are of the first kind
            raise RefitError(
                f"the engine could not open the learner's memory ({size} bytes on {device}): {error}. Its processes "
                "must be on one machine and see each other, also where they run in containers; else set "
                "weights.transport=collective or disk"
            ) from error

    def read(self, manifest: Manifest, bucket: int) -> list[tuple[str, Tensor]]:
        return views(self._memory[bucket % len(self._memory)], manifest[bucket])

    def close(self) -> None:
        self._memory = []
