"""Suggestions for mistyped names."""

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the most similar candidate, ignoring case, dashes and underscores; None if no candidate is similar."""
    plain = {_plain(candidate): candidate for candidate in sorted(candidates, reverse=True)}
    matches = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.6)
    if matches:
        return plain[matches[0]]
    swapped = [plain[key] for key in plain if sorted(key) == sorted(_plain(name))]
    if swapped:
        return swapped[0]
    longer = [plain[key] for key in sorted(plain) if len(name) >= 2 and key.startswith(_plain(name))]
    return longer[0] if longer else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``" Did you mean 'lr'?"`` or an empty string."""
    match = nearest(name, candidates)
    return f" Did you mean {match!r}?" if match else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
