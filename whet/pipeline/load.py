"""Reading a pipeline's file."""

from collections.abc import Sequence

from whet.config import ConfigIssue, Loaded, RecipeError, load
from whet.config.loading import recipe_names
from whet.config.nearest import did_you_mean
from whet.pipeline.config import SHIPPED, PipelineConfig


def load_pipeline(source: str, overrides: Sequence[str] = (), profile: str | None = None) -> Loaded[PipelineConfig]:
    """Read a pipeline by its path, or by its name one of the package. Raises ``RecipeError`` naming all mistakes."""
    names = recipe_names(SHIPPED)
    if source not in names and not source.endswith((".yaml", ".yml")):
        message = f"no pipeline has this name.{did_you_mean(source, names)} The package has: {', '.join(names)}"
        raise RecipeError([ConfigIssue("", repr(source), f"{message}. The path of a file ends in .yaml.")])
    return load(PipelineConfig, source, overrides, SHIPPED, profile=profile)
