"""Serialisation of calls for workers in other processes. Tensors are sent from their memory and are views of the
received message, so neither side copies a batch."""

import io
import os
import pickle
import struct
from typing import Any

import numpy as np

from whet.base.lazy import Tensor, torch
from whet.config.component import component_path, import_path

_ALIGNED = 64  # bytes; each part begins at a multiple of it


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, type) and (value.__module__ == "__main__" or os.sep in value.__module__):
            return import_path, (component_path(value),)  # of a script, which other processes import by its path
        if type(value) is not torch.Tensor:
            return NotImplemented
        try:
            return _tensor, (value.numpy(),)
        except (TypeError, RuntimeError):  # a dtype that numpy lacks, or a gradient: torch pickles it
            return NotImplemented


def _tensor(values: np.ndarray[Any, Any]) -> "Tensor":
    return torch.from_numpy(values)


def packed(value: object) -> list[memoryview]:
    """Pickle ``value``. The parts refer to its tensors' memory, which must not change until they are sent."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, 5, buffer_callback=buffers.append).dump(value)
    # Not getbuffer: Python before 3.12.2 crashes when the garbage collector finds that in a cycle.
    parts = [memoryview(file.getvalue()), *(buffer.raw() for buffer in buffers)]
    head = struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts))
    return [
        padded for part in (memoryview(head), *parts) for padded in (part, memoryview(bytes(-len(part) % _ALIGNED)))
    ]


def unpacked(message: bytearray) -> Any:
    """Return the value. Its tensors are views of ``message``."""
    whole = memoryview(message)
    (count,) = struct.unpack_from("<Q", whole)
    sizes = struct.unpack_from(f"<{count}Q", whole, 8)
    parts, at = list[memoryview](), 8 * (1 + count)
    for size in sizes:
        at += -at % _ALIGNED
        parts.append(whole[at : at + size])
        at += size
    return pickle.loads(parts[0], buffers=parts[1:])
