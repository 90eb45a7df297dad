"""A task set or a recipe, as a command's argument names it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.run.recipe import Recipe


def recipe_of(target: str, changes: list[str]) -> "Recipe":
    """Return the recipe, or the quickstart's with the task set, of which ``changes`` are the settings then."""
    from whet.config import load
    from whet.run.recipe import Recipe
    from whet.tasks.registry import TASK_SETS

    if target in TASK_SETS or ":" in target:
        return load(Recipe, "quickstart", [f"data={target}", *(f"data.{one}" for one in changes)]).value
    return load(Recipe, target, changes).value
