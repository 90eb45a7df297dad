"""Buckets of weights in memory that learner and engines share: on the CPU, written by the learner's first rank
(``shared_memory``), or on GPUs (``cuda_ipc``), where every rank of the learner writes whole buckets on its GPU for the
engine's rank there, so that no data leaves a GPU except in the learner's all-gather. Two buffers take turns: one is
filled while engines load from the other. They have no name in any file system, so nothing remains after a crash.

Who waits for whom: the first rank answers when all ranks have written a bucket (see ``Sender``), so that every engine's
rank finds it complete.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.parallel.mesh import Ranks, device_id
from whet.weights.manifest import Manifest, fill, largest_bucket, views
from whet.weights.shared_memory import Handle, open_shared, settle, share

BUFFERS = 2
Handles = dict[str, list[Handle]]
"""Handles of the buffers on each device, by ``device_id``."""


class BufferWriter:
    """The learner's end, on each rank that writes; ``ranks`` are None if only one does."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.device, self._ranks = device, ranks
        self._manifest: Manifest = ()
        self._memory: list[Tensor] = []
        self._before: list[Tensor] = []  # mapped by the engines until they have opened the newer buffers

    def open(self, manifest: Manifest) -> tuple[Handles, int] | None:
        """Allocate memory for the largest bucket. Return the handles and the size of the buffers if they are new."""
        self._manifest = manifest
        if self._ranks is None:
            handles = self._make_room()
            return None if handles is None else ({device_id(self.device): handles}, self._memory[0].numel())
        with self._ranks.fail_together("making room for weights"):
            handles = self._make_room()
        if handles is None:  # on all ranks alike, because they have the same manifests
            return None
        return dict(self._ranks.all_gather((device_id(self.device), handles))), self._memory[0].numel()

    def _make_room(self) -> list[Handle] | None:
        size = largest_bucket(self._manifest)
        if self._memory and size <= self._memory[0].numel():
            return None
        self._before, self._memory = self._memory, []
        made = [share(size, self.device) for _ in range(BUFFERS)]
        self._memory = [memory for memory, _ in made]
        return [handle for _, handle in made]

    def write(self, bucket: int, named: Iterable[tuple[str, Tensor]]) -> int:
        """Copy the tensors. A buffer is written again only after the engines have taken the bucket before."""
        fill(self._memory[bucket % len(self._memory)], self._manifest[bucket], named)
        settle(self.device)
        return sum(entry.size for entry in self._manifest[bucket])

    def taken(self) -> None:
        self._before = []

    def close(self) -> None:
        self._memory, self._before = [], []


class BufferReader:
    """The engine's end: maps the buffers on ``device``, of ``size`` bytes each. Raises ``RefitError`` if no rank of the
    learner writes on that device."""

    def __init__(self, device: torch.device, handles: Handles, size: int) -> None:
        local = handles.get(device_id(device))
        if local is None:
            raise RefitError(
                f"a rank of the engine computes on {device} ({device_id(device)}), but the learner's ranks are on "
                f"{', '.join(handles)}. With weights.transport=cuda_ipc, generator.devices must name GPUs of the "
                "learner; otherwise set weights.transport=collective or shared_memory"
            )
        try:
            self._memory = [open_shared(handle, size, device) for handle in local]
        except (RuntimeError, OSError) as error:  # RuntimeError: torch's errors, including CUDA's
            raise RefitError(
                f"the engine could not open the learner's memory ({size} bytes on {device}): {error}. Its processes "
                "must be on one machine and see each other, even if they run in containers; otherwise set "
                "weights.transport=collective or disk"
            ) from error

    def read(self, manifest: Manifest, bucket: int) -> list[tuple[str, Tensor]]:
        return views(self._memory[bucket % len(self._memory)], manifest[bucket])

    def close(self) -> None:
        self._memory = []
