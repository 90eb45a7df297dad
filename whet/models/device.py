"""The device of a part of a run, and copies to it."""

import os
from glob import glob

import torch
from torch import Tensor

from whet.base.errors import ConfigError
from whet.models.config import DeviceName

_GPUS = "/dev/nvidia[0-9]*"


def unused_gpus() -> str | None:
    """Return why torch can't use the NVIDIA GPUs of this machine, and what to do; None if it can, or if there are none
    that this process may use."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not glob(_GPUS):
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with it (https://pytorch.org)"
    return (
        f"torch {torch.__version__} can't use them, perhaps because their driver is older than its CUDA "
        f"{torch.version.cuda}; nvidia-smi prints the newest CUDA that the driver supports"
    )


def choose_device(name: DeviceName = "auto", rank: int = 0) -> torch.device:
    """Return a device for ``rank``: its GPU, if there are any (a cluster may have hidden the other ranks' GPUs from
    this process), otherwise the CPU. Raises ``ConfigError`` if a GPU is requested and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        why = unused_gpus()
        reason = f" ({why})" if why else ""
        raise ConfigError(
            f"learner.device = cuda, but this process sees no GPU{reason}; leave it out, or run whet doctor"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # cuDNN's attention plans each new shape for 25 ms to 1 s, and the blocks of a forest have new shapes in every
    # micro-batch (docs/gpu.md).
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def be_deterministic() -> None:
    """Make this process compute bit-identical results each time, or raise if an operation can't. On CPUs results are
    always bit-identical."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of CUDA's products
    torch.use_deterministic_algorithms(True)


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device, without waiting for the device."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
