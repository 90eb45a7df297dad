"""``whet doctor``: checks the installation, the machine, and whether a recipe's generator and learner agree."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.words import AsJson, Overrides, print_json
from whet.diagnose import checks

if TYPE_CHECKING:
    from whet.run.recipe import Recipe


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="Check this recipe, and whether its parts agree."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check this installation and machine. Exit code 1 if something needed is broken."""
    from whet.config import list_recipes

    found: list[checks.Finding] = []
    wanted, name = _loaded(recipe, overrides or []), recipe or "quickstart"
    usual = wanted or (_loaded(name, []) if recipe is None else None)
    for check in (
        checks.packages(),
        checks.machine(),
        checks.memory(name, usual),
        checks.threads(),
        checks.products(wanted),
        checks.sandbox(),
        checks.model_cache(wanted),
        checks.recipes_validate([recipe] if recipe else list(list_recipes()), overrides or []),
        _agreement(wanted),
    ):
        for finding in check:
            found.append(finding)
            if not as_json:
                _print(finding)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in found])
    else:
        print("\n" + summary(found))
    if any(finding.state == "broken" for finding in found):
        raise typer.Exit(1)


def summary(found: Sequence[checks.Finding]) -> str:
    """Return what is wrong, once more and the worst first, with what to do."""
    listed = []
    for state, word in (("broken", "broken"), ("unsafe", "unsafe"), ("advice", "advice")):
        some = [finding for finding in found if finding.state == state]
        listed += [f"{word}: {one.subject}" + (f" -> {one.advice}" if one.advice else "") for one in some]
    if not any(finding.state == "broken" for finding in found):
        listed.append("nothing that every run needs is broken" if listed else "nothing that a run needs is broken")
    return "\n".join(listed)


def _loaded(recipe: str | None, overrides: list[str]) -> "Recipe | None":
    """Return the recipe; None where it does not load, which ``recipes_validate`` reports."""
    from whet.base.errors import ConfigError
    from whet.config import load
    from whet.run.recipe import Recipe

    try:
        return load(Recipe, recipe, overrides).value if recipe else None
    except ConfigError:
        return None


def _agreement(wanted: "Recipe | None") -> Iterator[checks.Finding]:
    """Sample a few answers and have the learner score them, if there is a recipe and it samples."""
    from whet.algorithms.base import OnlineAlgorithm
    from whet.base.errors import WhetError

    if wanted is None or not isinstance(wanted.algorithm, OnlineAlgorithm):
        return
    from whet.diagnose.agreement import measure_agreement
    from whet.processes.compute import run_computing

    try:
        found = run_computing(measure_agreement(wanted))
    except WhetError as error:
        yield checks.Finding("agreement", f"can't be measured: {error}", "broken")
        return
    difference = f"mean exp|lp_learner - lp_generator| {found.error:.4f} over {found.tokens} sampled tokens"
    yield checks.Finding("agreement", difference, "good" if found.agrees else "broken", found.cause or "")
    if found.agrees and not found.stopped:
        advice = "is the chat template the model's own, and sampling.max_new_tokens enough?"
        yield checks.Finding("answers", "none ended by itself", "advice", advice)


def _print(finding: checks.Finding) -> None:
    mark = {"good": "ok    ", "advice": "advice", "unsafe": "UNSAFE", "broken": "BROKEN"}[finding.state]
    typer.secho(f"{mark}  {finding.subject:<16}  {finding.value}", fg="red" if mark.isupper() else None)
    if finding.advice:
        print(f"        {'':<16}  -> {finding.advice}", flush=True)
