"""``whet plan``: the ranks, memory and refit size of a recipe, without starting it."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import AsJson, Overrides, RecipeArgument, print_json
from whet.processes.machine import memory_gib

if TYPE_CHECKING:
    from whet.diagnose.plan import Plan


def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="GIB", min=0.0, help="Memory of one device; by default, this machine's."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a recipe's ranks, the memory of each, and the size of a refit. Starts nothing."""
    from whet.config import load
    from whet.diagnose.memory import resident
    from whet.diagnose.plan import make_plan
    from whet.models.config import check_models
    from whet.run.recipe import Recipe

    settings = load(Recipe, recipe, overrides or []).value
    check_models(settings)
    gpu = settings.learner.device == "cuda" or (settings.learner.device == "auto" and _gpu_memory() is not None)
    available = memory or (_gpu_memory() if gpu else None) or memory_gib()[0]
    result = make_plan(settings, resident(), int(available * 1024**3), gpu=gpu)
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        _print(result)


def _gpu_memory() -> float | None:
    """Return the memory of the first GPU in GiB, or None without a GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 1024**3 if torch.cuda.is_available() else None


def _print(plan: "Plan") -> None:
    from whet.base.files import format_bytes
    from whet.sandbox.sandbox import UNPROTECTED
    from whet.show.metric_catalog import show

    for role, model in plan.models.items():
        experts = f" ({show(model.experts, 'count')} in experts)" if model.experts else ""
        print(f"{role}: {show(model.parameters, 'count')} parameters{experts}, {model.layers} layers")
    for line in plan.quantized:
        print(line)
    each = "" if len(plan.models) == 1 else " each"
    print(f"learner: {plan.ranks} rank{'s' * (plan.ranks > 1)}{each}")
    for line in plan.layout:
        print(f"  {line}")
    print(f"  computes in {plan.precision}")
    print(f"  a step learns from {plan.batch}")
    print(f"  largest micro-batch: {plan.tokens:,} tokens; a step is split into micro-batches (learner.max_tokens)")
    for process, memory in plan.processes.items():
        print(f"\nmemory of {process}, at most")
        for phase, kinds in {"always": memory.always, **memory.phases}.items():
            for name, size in kinds.items():
                print(f"  {phase:<22} {name:<28} {format_bytes(size):>11}")
        print(f"  {'peak':<22} {'':<28} {format_bytes(memory.peak()):>11}")
    if plan.refit:
        first = f", the first one {format_bytes(plan.first_refit)}" if plan.first_refit else ""
        print(f"\na refit moves {format_bytes(plan.refit)} in {plan.refit_tensors} tensors{first}")
    for warning in plan.warnings:
        typer.secho(f"warning: {warning}", fg="red" if warning == UNPROTECTED else None)
