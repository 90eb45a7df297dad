"""Errors of a recipe, each with its key, its place and what was expected; all are reported together. And
suggestions for mistyped names."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from whet.base.addresses import hidden
from whet.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """One mistake in a recipe."""

    key: str  # dotted; empty if it concerns the whole file
    where: str  # "quickstart.yaml:12" or "override 3 (optimizer.lr=abc)"
    message: str

    def __str__(self) -> str:
        return hidden(": ".join(part for part in (self.where, self.key, self.message) if part))


class RecipeError(ConfigError):
    """All mistakes of a recipe."""

    def __init__(self, issues: list[ConfigIssue]) -> None:
        self.issues = list(dict.fromkeys(issues))
        if len(self.issues) == 1:
            super().__init__(str(self.issues[0]))
        else:
            lines = "".join(f"\n  {issue}" for issue in self.issues)
            super().__init__(f"{len(self.issues)} problems in the recipe:{lines}")


class SettingsError(ConfigError, ValueError):
    """All mistakes of settings made in Python, as by ``GRPO(group_size=1)``. A ``ValueError``, so that pydantic
    reports it with other mistakes if a validator makes settings."""

    def __init__(self, issues: list[ConfigIssue]) -> None:
        self.issues = issues
        super().__init__("\n".join(map(str, issues)))


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the most similar candidate, ignoring case, dashes and underscores; None if no candidate is similar."""
    plain = {_plain(candidate): candidate for candidate in sorted(candidates, reverse=True)}
    swapped = [plain[key] for key in plain if sorted(key) == sorted(_plain(name))]
    if swapped:  # grpo for gpro, to which gspo is as similar
        return max(swapped, key=lambda each: difflib.SequenceMatcher(None, _plain(each), _plain(name)).ratio())
    matches = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.6)
    if matches:
        return plain[matches[0]]
    longer = [plain[key] for key in sorted(plain) if len(name) >= 2 and key.startswith(_plain(name))]
    return longer[0] if longer else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``" Did you mean 'lr'?"`` or an empty string."""
    match = nearest(name, candidates)
    return f" Did you mean {match!r}?" if match else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
