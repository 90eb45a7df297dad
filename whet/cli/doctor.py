"""``whet doctor``: checks the installation, the machine, and whether a recipe's generator and learner agree."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import AsJson, Overrides, print_json
from whet.diagnose import checks

if TYPE_CHECKING:
    from whet.run.recipe import Recipe


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="Also check this recipe, and whether its generator and learner agree."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check this installation and machine. Exit code 1 if something that is needed is broken."""
    from whet.config import list_recipes

    findings: list[checks.Finding] = []
    settings, name = _loaded(recipe, overrides or []), recipe or "quickstart"
    for_memory = settings or (_loaded(name, []) if recipe is None else None)
    for check in (
        checks.packages(),
        checks.machine(),
        checks.memory(name, for_memory),
        checks.threads(),
        checks.products(settings),
        checks.sandbox(),
        checks.model_cache(settings),
        checks.recipes_validate([recipe] if recipe else list(list_recipes()), overrides or []),
        _agreement(settings),
    ):
        for finding in check:
            findings.append(finding)
            if not as_json:
                _print(finding)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        print("\n" + summary(findings))
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def summary(findings: Sequence[checks.Finding]) -> str:
    """Return the problems, most severe first, each with its remedy."""
    lines = []
    for state in ("broken", "unsafe", "advice"):
        for finding in (finding for finding in findings if finding.state == state):
            lines.append(f"{state}: {finding.subject}" + (f" -> {finding.advice}" if finding.advice else ""))
    if not any(finding.state == "broken" for finding in findings):
        lines.append("nothing that every run needs is broken" if lines else "nothing that a run needs is broken")
    return "\n".join(lines)


def _loaded(recipe: str | None, overrides: list[str]) -> "Recipe | None":
    """Return the recipe, or None if it does not load, which ``recipes_validate`` reports."""
    from whet.base.errors import ConfigError
    from whet.config import load
    from whet.run.recipe import Recipe

    try:
        return load(Recipe, recipe, overrides).value if recipe else None
    except ConfigError:
        return None


def _agreement(recipe: "Recipe | None") -> Iterator[checks.Finding]:
    """Sample a few answers and have the learner score them, if the recipe samples."""
    from whet.algorithms.base import OnlineAlgorithm
    from whet.run.policies import models_of

    if recipe is None or not isinstance(recipe.algorithm, OnlineAlgorithm):
        return
    for name, policy_recipe in (("", recipe.model_copy(update={"policies": {}})), *models_of(recipe)):
        yield from _agreement_of(policy_recipe, f" of {name}" if name else "")


def _agreement_of(recipe: "Recipe", whose: str) -> Iterator[checks.Finding]:
    """Check one policy, as if it were the only one."""
    from whet.base.errors import WhetError
    from whet.diagnose.agreement import measure_agreement
    from whet.processes.compute import run_computing

    try:
        agreement = run_computing(measure_agreement(recipe))
    except WhetError as error:
        yield checks.Finding(f"agreement{whose}", f"can't be measured: {error}", "broken")
        return
    difference = f"mean exp|lp_learner - lp_generator| {agreement.error:.4f} over {agreement.tokens} sampled tokens"
    yield checks.Finding(
        f"agreement{whose}", difference, "good" if agreement.agrees else "broken", agreement.cause or ""
    )
    if agreement.agrees and not agreement.stopped:
        advice = "check that the chat template is the model's, and raise sampling.max_new_tokens"
        yield checks.Finding(f"answers{whose}", "all were truncated: the model ended none itself", "advice", advice)


def _print(finding: checks.Finding) -> None:
    mark = {"good": "ok    ", "advice": "advice", "unsafe": "UNSAFE", "broken": "BROKEN"}[finding.state]
    typer.secho(f"{mark}  {finding.subject:<16}  {finding.value}", fg="red" if mark.isupper() else None)
    if finding.advice:
        print(f"        {'':<16}  -> {finding.advice}", flush=True)
