"""The GPUs of a machine, as processes of other programs name them. Asks the driver, so that a process to which Ray or
Slurm shows none can ask, too."""

import os
from collections.abc import Sequence

from whet.base.errors import ConfigError


def visible_gpus(names: Sequence[str], key: str) -> tuple[str, ...]:
    """Return GPUs as CUDA_VISIBLE_DEVICES of another process names them. Numbers in ``names`` are those that this
    process counts by, which sees a part of the machine's where Slurm or the user says so. Raises ``ConfigError``, which
    names ``key``, for a number beyond them."""
    mine = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    if not mine:  # all, or, where a cluster hides them from whoever starts the run, none: then the machine's count
        return tuple(names)
    beyond = next((name for name in names if name.isdecimal() and int(name) >= len(mine)), None)
    if beyond is not None:
        raise ConfigError(
            f"{key} names GPU {beyond}, and this process sees {len(mine)}, from 0 on: CUDA_VISIBLE_DEVICES="
            f"{','.join(mine)}"
        )
    return tuple(mine[int(name)] if name.isdecimal() else name for name in names)


def free_share(names: Sequence[str]) -> float:
    """Return which share of its memory is free on the fullest of these GPUs; 1 where the driver can't be asked."""
    try:
        import pynvml
    except ImportError:
        return 1.0
    try:
        pynvml.nvmlInit()
        try:
            handles = [
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            ]
            held = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 1.0
    return min((one.free / one.total for one in held), default=1.0)
