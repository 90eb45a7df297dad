"""Memory that processes share: on a CPU, through a file without a name, or on one GPU, through CUDA IPC. Callers need
not know which. The CUDA branch of each function does the same as torch.multiprocessing."""

import os
import pickle
import socket
import weakref
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from whet.base.errors import ConfigError, RefitError

Handle = bytes
"""The handle by which another process of this machine opens the memory."""
_DEVICE = 6  # index of the device's number among the arguments of ``rebuild_cuda_tensor``


def share(size: int, device: torch.device) -> tuple[Tensor, Handle]:
    """Return [size] bytes (uint8) on ``device``, and their handle, which can be opened while the memory exists here.
    For GPU memory torch counts its users, so each handle must be opened by exactly one process."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory, pickle.dumps(reduce_tensor(memory)[1])
    if not hasattr(os, "memfd_create"):
        raise ConfigError("weights.transport=shared_memory needs Linux; use weights.transport=disk")
    file = os.memfd_create("whet-weights")
    try:
        os.ftruncate(file, size)
        memory = _mapped(f"/proc/self/fd/{file}", size)
    except (OSError, RuntimeError) as error:
        os.close(file)
        raise RefitError(
            f"{size / 2**20:.0f} MiB of memory for sending weights could not be allocated: {error}"
        ) from error
    weakref.finalize(memory, os.close, file)
    return memory, f"/proc/{os.getpid()}/fd/{file}".encode()


def open_shared(handle: Handle, size: int, device: torch.device) -> Tensor:
    """Return the same memory, in another process. ``device`` is its device, as numbered in this process."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(handle))
        arguments[_DEVICE] = device.index
        memory: Tensor = rebuild_cuda_tensor(*arguments)
        return memory
    return _mapped(handle.decode(), size)


def settle(device: torch.device) -> None:
    """Return when a device has finished its queued work: then other processes may read or overwrite its memory."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def machine() -> str:
    """Return a name that is equal for processes that can share memory: on one boot of one system, with the same process
    namespace."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
