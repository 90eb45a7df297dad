"""The device that a part of a run computes on, and the ways to it."""

import os

import torch
from torch import Tensor

from whet.base.errors import ConfigError
from whet.models.config import DeviceName


def choose_device(wanted: DeviceName = "auto", rank: int = 0) -> torch.device:
    """Return a device for one of several ``rank``s: a GPU of its own, where there are any (a cluster may have hidden
    the others' from this process), else the CPU. Raises ``ConfigError`` where a GPU is wanted and there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("learner.device = cuda, and this process sees no GPU; leave it out, or look at whet doctor")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # cuDNN's attention makes a plan for each new shape, 25 ms to 1 s long, and the blocks of a forest have new shapes
    # in every micro-batch (docs/gpu.md).
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def be_deterministic() -> None:
    """Have this process compute the same bits each time, or raise where an operation can't. On CPUs it does anyway."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's products are first used
    torch.use_deterministic_algorithms(True)


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU's tensor on a device, without waiting for what the device is doing."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
