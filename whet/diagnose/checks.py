"""The checks of ``whet doctor``. Each check examines one subject and yields findings, without side effects."""

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
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

from whet.base.extras import EXTRAS, names_extra
from whet.processes.machine import cores, memory_gib

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from whet.models.rates import Rates
    from whet.run.recipe import Recipe

State = Literal["good", "advice", "unsafe", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    subject: str
    value: str
    state: State = "good"
    advice: str = ""  # what to do about it


_SLOW_CORE = 8.0  # GFLOP/s of one core
_IMPORTED = ("torch", "transformers")  # version mismatches show only at import


def packages() -> Iterator[Finding]:
    """Check Python, the required packages (installed, new enough, importable), and which extras are installed."""
    yield Finding("python", platform.python_version())
    good: list[str] = []
    optional: dict[str, list[Requirement]] = {name: [] for name in EXTRAS}
    for need in map(Requirement, importlib.metadata.requires("whet") or ()):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            if problem := _problem(need):
                yield problem
            else:
                good.append(f"{need.name} {importlib.metadata.version(need.name)}")
        for name, needs in optional.items():
            if need.marker and not need.marker.evaluate({"extra": ""}) and need.marker.evaluate({"extra": name}):
                needs.append(need)
    yield Finding("packages", f"{len(good)} as declared: {', '.join(good)}")
    for name, needs in optional.items():
        if needs:
            yield _extra(name, needs)


def _problem(need: Requirement) -> Finding | None:
    """Return the problem with a required package, if any."""
    install = f'pip install "{need.name}{need.specifier}"'
    version = _version(need)
    if version is None:
        return Finding(need.name, "not installed", "broken", install)
    if not need.specifier.contains(version, prereleases=True):
        return Finding(need.name, f"{version}, outside {need.specifier}", "broken", install)
    if problem := _import_problem(need.name) if need.name in _IMPORTED else None:
        advice = "torchvision or torchaudio built for another torch often cause this: uninstall or match them"
        return Finding(need.name, f"{version}, but it can't be imported: {problem}", "broken", advice)
    return None


def _extra(name: str, needs: list[Requirement]) -> Finding:
    """Return whether an extra is installed, and its purpose. A missing extra is not an error."""
    subject, install = f"whet[{name}]", f"pip install 'whet[{name}]'"
    versions = {need.name: _version(need) for need in needs}
    old = [n for n in needs if (v := versions[n.name]) and not n.specifier.contains(v, prereleases=True)]
    if old:
        text = ", ".join(f"{need.name} {versions[need.name]}, outside {need.specifier}" for need in old)
        return Finding(subject, text, "advice", install)
    absent = [package for package, version in versions.items() if version is None]
    if absent:
        return Finding(subject, f"{EXTRAS[name]}: without {', '.join(absent)}", advice=install)
    return Finding(subject, EXTRAS[name])


def _version(need: Requirement) -> str | None:
    try:
        return importlib.metadata.version(need.name)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory(name: str, recipe: "Recipe | None") -> Iterator[Finding]:
    """Compare the free memory with the need of a recipe according to ``whet plan``."""
    total, free = memory_gib()
    value = f"{free:.1f} GiB free of {total:.1f}"
    if recipe is None or _import_problem("torch") or _model_config(recipe) is None:
        yield Finding("memory", value)
        return
    import torch

    from whet.diagnose.memory import resident
    from whet.diagnose.plan import make_plan

    peak = sum(memory.peak() for memory in make_plan(recipe, resident()).processes.values()) / 2**30
    value += f"; {name} needs at most {peak:.1f} (whet plan {name})"
    scarce = free < peak and not torch.cuda.is_available()
    advice = "close other programs, or lower learner.pack_tokens or set learner.activation_checkpointing=true"
    yield Finding("memory", value, "advice" if scarce else "good", advice if scarce else "")


def machine() -> Iterator[Finding]:
    """Report cores, disk and GPUs."""
    yield Finding("cores", f"{cores()} usable of {os.cpu_count()}")
    disk = shutil.disk_usage(Path.cwd())
    low = disk.free < 5 * 2**30
    advice = "checkpoints need room: a few times the model's size" if low else ""
    yield Finding("disk here", f"{disk.free / 2**30:.0f} GiB free", "advice" if low else "good", advice)
    if _import_problem("torch"):
        return
    import torch

    from whet.models.device import unused_gpus

    if (why := unused_gpus()) is not None:
        yield Finding("GPU", "none that torch can use, though this machine has NVIDIA GPUs", "advice", why)
    elif not torch.cuda.is_available():
        yield Finding("GPU", "none; whet trains small models on the CPU")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")


def threads() -> Iterator[Finding]:
    """Check OpenMP: several runtimes, or wrong settings, make threads on the same cores slow each other down."""
    yield from _runtimes()
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy:
        advice = (
            "unset OMP_WAIT_POLICY: with PASSIVE, waking threads doubles the time of decoding; with ACTIVE, idle "
            "threads take the cores from graders and from other programs. whet limits how long threads spin"
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
    """Find the OpenMP runtimes that a training process loads, if the system lists them: each has its own threads."""
    if not maps.exists() or any(map(_import_problem, _IMPORTED)):
        return
    runtimes = sorted(set(re.findall(r"/\S*/(lib(?:g|i)?omp\S*)", maps.read_text())))
    if len(runtimes) > 1:
        advice = (
            "two thread pools on the same cores slow each other down: uninstall the package that loads the second one"
        )
        yield Finding("OpenMP", " and ".join(runtimes), "advice", advice)
    elif runtimes:
        yield Finding("OpenMP", runtimes[0])


def products(recipe: "Recipe | None" = None) -> Iterator[Finding]:
    """Measure matrix products with the shapes of the recipe's model, by default SmolLM2-135M, in each precision, for
    about half a second; and report which precision a run would choose."""
    if _import_problem("torch"):
        return
    import torch

    from whet.algorithms.base import OnlineAlgorithm
    from whet.models.precision import choose_precision
    from whet.models.rates import Shapes, measure

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model_config(recipe)
    rates = measure(Shapes() if model is None else Shapes.of(model), device)
    yield from rates_judged(rates, f"on {'one core' if device == 'cpu' else 'the GPU'}")
    choice = choose_precision(model, device)
    asked: dict[str, str] = {} if recipe is None else {"learner.precision": recipe.learner.precision}
    if recipe is not None and isinstance(recipe.algorithm, OnlineAlgorithm):
        asked["generator.dtype"] = recipe.generator.dtype
    slow = [key for key, precision in asked.items() if precision == "bfloat16" and choice.emulates]
    advice = (
        f"the recipe sets bfloat16, which is emulated here: set {' '.join(f'{k}=auto' for k in slow)}" if slow else ""
    )
    yield Finding("precision", f"auto is {choice}", "advice" if slow else "good", advice)


def rates_judged(rates: "Rates", where: str) -> Iterator[Finding]:
    """Report slow rates. The rates of one core are compared with processors of the last ten years."""
    from whet.models.rates import GAIN, number

    for subject, (wide, narrow) in zip(
        ("linear layers", "batched products"), zip(rates.of("float32"), rates.of("bfloat16"), strict=True), strict=True
    ):
        advice = ""
        if max(wide, narrow) < _SLOW_CORE:
            advice = "slow in both: the processor may be shared or throttled, or torch built for another processor"
        elif narrow * GAIN <= wide:
            advice = "bfloat16 is emulated: leave learner.precision and generator.dtype at auto, or set float32"
        value = f"{number(wide)} GFLOP/s in float32, {number(narrow)} in bfloat16, {where}"
        yield Finding(subject, value, "advice" if advice else "good", advice)


def sandbox() -> Iterator[Finding]:
    """Check that model-written programs can be isolated here, with a program that tries forbidden operations."""
    from whet.sandbox.sandbox import available_isolation

    kind, problems = available_isolation()
    if kind is not None:
        yield Finding("sandbox", f"by {kind}")
    else:
        advice = "tasks whose answers are programs will refuse to start; see docs/sandbox.md"
        yield Finding("sandbox", f"none: {'; '.join(problems)}", "advice", advice)


def model_cache(recipe: "Recipe | None" = None) -> Iterator[Finding]:
    """Report where models are kept, and whether the quickstart's model is there, which most recipes start from."""
    from whet.base.errors import WhetError
    from whet.fetch.download import cache_folder
    from whet.fetch.smollm2 import NAME, check_available, installed_package

    try:
        folder = cache_folder()
    except WhetError as error:
        yield Finding("model cache", "none", "advice", str(error))
        return
    hub = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    yield Finding("model cache", f"{folder}; Hugging Face: {hub}")
    if (folder / NAME).is_dir():
        yield Finding("quickstart model", f"{NAME} is converted")
        return
    try:
        check_available()
    except WhetError as error:
        value = f"{NAME} is not here, and recipes that start from it fail, as whet train quickstart does"
        needed = recipe is not None and recipe.model.path == NAME
        yield Finding("quickstart model", value, "broken" if needed else "advice", str(error))
        return
    done = "converted" if installed_package() else "downloaded from PyPI (94 MB) and converted"
    yield Finding("quickstart model", f"{NAME} will be {done} at first use")


def recipes_validate(names: list[str], overrides: list[str]) -> Iterator[Finding]:
    """Load each recipe. Of several, one whose extra is not installed is not broken, like the extra itself."""
    from whet.base.errors import WhetError
    from whet.config import load
    from whet.run.recipe import Recipe
    from whet.sandbox.sandbox import UNPROTECTED, is_unprotected

    failed = 0
    for name in names:
        try:
            if is_unprotected(load(Recipe, name, overrides).value.model_dump(mode="json")):
                yield Finding(f"recipe {name}", UNPROTECTED, "unsafe")
        except WhetError as error:
            failed += 1
            optional = len(names) > 1 and names_extra(str(error))
            yield Finding(f"recipe {name}", str(error), "good" if optional else "broken")
    if not failed:
        yield Finding("recipes", f"{names[0]}: valid" if len(names) == 1 else f"all {len(names)} are valid")


def _model_config(recipe: "Recipe | None") -> "PretrainedConfig | None":
    """Return the config of the recipe's model, or None if it is missing, which another check reports."""
    from whet.base.errors import WhetError
    from whet.models.loading import load_model_config

    try:
        return None if recipe is None else load_model_config(recipe.model)
    except (WhetError, OSError, ValueError):
        return None


def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
