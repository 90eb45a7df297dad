"""``whet plan``: the ranks, memory, refit size, steps, tokens and time of a recipe, without starting it."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.progress import about
from whet.cli.arguments import AsJson, Overrides, RecipeArgument, print_json
from whet.processes.machine import memory_gib

if TYPE_CHECKING:
    from whet.diagnose.duration import Duration
    from whet.diagnose.plan import Plan
    from whet.diagnose.work import Work


def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="GIB", min=0.001, help="Memory of one device; by default, this machine's."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a recipe's ranks, their memory, the size of a refit, its steps, tokens and time. Starts nothing."""
    from whet.config import load
    from whet.diagnose.memory import resident
    from whet.diagnose.plan import add_work, make_plan
    from whet.models.config import check_models
    from whet.run.recipe import Recipe

    settings = load(Recipe, recipe, overrides or []).value
    check_models(settings)
    gpu = settings.learner.device == "cuda" or (settings.learner.device == "auto" and _gpu_memory() is not None)
    available = memory or (_gpu_memory() if gpu else None) or memory_gib()[0]
    result = make_plan(settings, resident(), int(available * 1024**3), gpu=gpu)
    add_work(result, settings)
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
    if plan.work is not None:
        _print_work(plan.work, plan.time)
    for warning in plan.warnings:
        typer.secho(f"warning: {warning}", fg="red" if warning == UNPROTECTED else None)


def _print_work(work: "Work", time: "Duration | None") -> None:
    most = "at most " if work.at_most else ""
    print(f"\nan epoch is {work.train:,} {work.unit} in {work.steps_per_epoch:,.4g} steps: {most}"
          f"{work.tokens_per_epoch:,} tokens, {work.trained_per_epoch:,} of them trained")  # fmt: skip
    if work.counted < work.train:
        print(f"  tokens were counted in {work.counted:,} of the {work.unit}")
    if work.unusable:
        print(f"  {work.unusable:,} of {work.counted + work.unusable:,} rows will be left out")
    epochs = f"{work.steps / work.steps_per_epoch:.3g}"
    many = "s" * (epochs != "1")
    print(f"the run is {work.steps:,} steps: {epochs} epoch{many}, {work.optimizer_steps:,} optimizer steps")
    print(f"  a step is {most}{work.tokens_per_step:,} tokens, {work.trained_per_step:,} of them trained")
    if time is None:
        print("its time is not estimated: it computes elsewhere than in one process on a CPU")
        return
    numbers = {"": work.held_out, **work.sets}
    longest = " if all answers have their maximal length" if work.at_most else ""
    print(f"its time is estimated as {about(time.total)}{longest}, without loading, grading, saving and publishing")
    for name, seconds, count in (
        ("sampling a step", time.sampling, work.steps),
        ("learning from a step", time.learning, work.steps),
        *(
            (f"evaluating on {numbers[name]:,} {work.unit}{name and f' of {name}'}", seconds, work.evaluations)
            for name, seconds in time.evaluations.items()
        ),
    ):
        if seconds and count:
            each = f"{seconds:.2g} s" if seconds < 60 else about(seconds)
            print(f"  {name:<28} {count:>6,} x {each:>9} = {about(seconds * count):>10}")
    linear, batched = time.gflops
    cores = f"{time.threads} core{'s' * (time.threads > 1)}"
    print(f"  on {cores} of {linear:.3g} GFLOP/s in linear layers and {batched:.3g} in batched products")
