"""``whet show``: prints a resolved recipe, with the origin of each value."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import AsJson, Overrides, RecipeArgument, print_json

if TYPE_CHECKING:
    from whet.run.recipe import Recipe

PRECISIONS = ("learner.precision", "generator.dtype")


def show(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="KEY", help="Print type, limits, origin and meaning of one key.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved recipe as YAML, each value with its origin."""
    from whet.config import load
    from whet.config.explain import annotated_yaml, explained
    from whet.config.explain import explain as as_text
    from whet.run.recipe import Recipe

    loaded = load(Recipe, recipe, overrides or [])
    if explain is not None and as_json:
        print_json({"key": explain, **explained(loaded, explain), **_choice(explain, loaded.value)})
    elif explain is not None:
        print(as_text(loaded, explain), end="")
        for name, text in _choice(explain, loaded.value).items():
            print(f"  {name:<7}  {text}")
    elif as_json:
        print(loaded.value.model_dump_json(indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        text = annotated_yaml(loaded, _notes(loaded.value))
        coloured = Syntax("", "yaml", theme="ansi_dark", background_color="default").highlight(text)
        Console().print(coloured, soft_wrap=True, end="")
    else:
        print(annotated_yaml(loaded, _notes(loaded.value)), end="")


def _notes(recipe: "Recipe") -> dict[str, str]:
    """Return notes on values that the machine decides when a run starts, by key."""
    text = "bfloat16 or float32, measured when a run starts; --explain learner.precision measures now"
    values = (recipe.learner.precision, recipe.generator.dtype)
    return {key: text for key, value in zip(PRECISIONS, values, strict=True) if value == "auto"}


def _choice(key: str, recipe: "Recipe") -> dict[str, str]:
    """Return the precision that is chosen on this machine, if the key is about it."""
    if key not in PRECISIONS:
        return {}
    from whet.run.machine import decide

    return {"here": str(decide(recipe, starts=False)[1])}
