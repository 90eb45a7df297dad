"""The problems of a recipe, each with its key, its place and what was expected, all shown at once."""

from dataclasses import dataclass

from whet.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake to correct."""

    key: str  # dotted; empty when it concerns the whole file
    where: str  # "quickstart.yaml:12" or "override 3 (optimizer.lr=abc)"
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class RecipeError(ConfigError):
    """All problems of a recipe together."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = list(dict.fromkeys(problems))
        if len(self.problems) == 1:
            super().__init__(str(self.problems[0]))
        else:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} problems in the recipe:{lines}")
