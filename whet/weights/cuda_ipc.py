"""Buckets of weights through memory of the GPUs themselves, where a rank of the learner and a rank of the engine share
each of them: every rank of the learner writes all of a bucket on its own GPU, and the engine's rank there reads it. No
byte leaves a GPU but what the learner's ranks gather. The same code runs on CPUs; see ``memory.py`` for what is CUDA's.

Who waits for whom: the first rank answers when all ranks have written a bucket (``Sender`` sees to it), so that every
engine's rank finds it complete.
"""

from typing import Any

import torch

from whet.errors import ConfigError, RefitError
from whet.parallel.mesh import Ranks, device_id
from whet.weights.memory import Handle
from whet.weights.parcel import Layout
from whet.weights.sender import machine
from whet.weights.shared_memory import Slots

Handles = dict[str, list[Handle]]
"""Of the buffers on each device, by ``device_id``."""


class CudaIpc(Slots):
    """The sender's side, on each rank; ``ranks`` are None where there is only one."""

    method = "take_memory"

    def __init__(self, device: torch.device, ranks: Ranks | None) -> None:
        super().__init__(device)
        self._ranks = ranks

    def open(self, layout: Layout) -> tuple[str, tuple[Any, ...]] | None:
        """Make room for the largest bucket, on all ranks. Where it is new, returns the handles of all devices."""
        if self._ranks is None:
            new = self.make_room(layout)
            return None if new is None else ("map_device_memory", ({device_id(self.device): new[0]}, new[1]))
        with self._ranks.together("making room for weights"):
            new = self.make_room(layout)
        if new is None:  # on all of them: they have the same layouts
            return None
        said = self._ranks.all((machine(), device_id(self.device), new[0]))
        machines = {where for where, _, _ in said}
        if len(machines) > 1:
            raise ConfigError(
                "weights.transport=cuda_ipc shares the memory of one machine's GPUs, and the learner's ranks are on "
                f"{len(machines)} machines; set weights.transport=collective"
            )
        return "map_device_memory", ({device: handles for _, device, handles in said}, new[1])


def own(handles: Handles, device: torch.device) -> list[Handle]:
    """Those of an engine's device. Raises ``RefitError`` where no rank of the learner is on it."""
    found = handles.get(device_id(device))
    if found is None:
        raise RefitError(
            f"a rank of the engine computes on {device} ({device_id(device)}), where no rank of the learner is: "
            f"these are on {', '.join(handles)}. With weights.transport=cuda_ipc, generator.devices has to name GPUs "
            "of the learner's; else set weights.transport=collective or shared_memory"
        )
    return found
