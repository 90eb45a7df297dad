"""Arguments of commands that are either a task set or a recipe."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.run.recipe import Recipe


def recipe_of(target: str, changes: list[str]) -> "Recipe":
    """Return the recipe ``target`` with ``changes``, or for a task set a recipe of it with these settings of it and
    otherwise its own defaults."""
    from whet.config import load
    from whet.config.loading import load_overrides
    from whet.run.recipe import Recipe
    from whet.tasks.base import TASK_SETS

    if target in TASK_SETS or ":" in target:
        settings = [f"data={target}", *(f"data.{change}" for change in changes)]
        return load_overrides(Recipe, [*settings, "model=smollm2-135m-instruct", "algorithm=grpo", "steps=1"])
    return load(Recipe, target, changes).value
