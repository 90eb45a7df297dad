"""Errors of a recipe, each with its key, its place and what was expected; all are reported together."""

from dataclasses import dataclass

from whet.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """One mistake in a recipe."""

    key: str  # dotted; empty if it concerns the whole file
    where: str  # "quickstart.yaml:12" or "override 3 (optimizer.lr=abc)"
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class RecipeError(ConfigError):
    """All mistakes of a recipe."""

    def __init__(self, issues: list[ConfigIssue]) -> None:
        self.issues = list(dict.fromkeys(issues))
        if len(self.issues) == 1:
            super().__init__(str(self.issues[0]))
        else:
            lines = "".join(f"\n  {issue}" for issue in self.issues)
            super().__init__(f"{len(self.issues)} problems in the recipe:{lines}")
