r"""Which of the offered letters an answer names. Knows no task and no file.

An answer names one option or none: two letters, a letter beside another option's text, and a letter that isn't offered
are no answer.
"""

import re
import string
from collections.abc import Mapping
from typing import Literal

import regex

from whet.environments.math_grader import last_boxed
from whet.errors import DataError

Mode = Literal["boxed", "lenient", "line", "regex"]

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|boldsymbol)\s*\{(.*)\}", re.DOTALL)
_LABEL = re.compile(r"[^\w\\]*([A-Za-z])(?:[^\w\\]*|[^\w\\]*?[:).\]\-]\s*(.*))", re.DOTALL)  # B, (B), B: text
_LINE = re.compile(r"^[\W_]*(?:final\s+)?answer[\W_]*?:(.*)$", re.IGNORECASE | re.MULTILINE)
_ALTERNATIVE = re.compile(r"\s*(?:[/|,&;+]|\bor\b|\band\b)\s*[A-Za-z]\b", re.IGNORECASE)
_LONGEST = 20_000  # characters of an answer that are looked at, the last ones
_SECONDS = 1.0


def chosen(answer: str, options: Mapping[str, str], mode: Mode, pattern: str | None = None) -> str | None:
    r"""Return the letter of the option that the answer names; None if it names none or several.

    ``boxed``: the last ``\boxed{}`` holds a letter, or a letter and its option's text. ``lenient``: or an option's text
    alone, where no other option has the same. ``line``: the same after the last ``Answer:``. ``regex``: after the last
    match of ``pattern``, its first group. Raises ``TimeoutError`` for a pattern that never ends on this answer.

    >>> chosen(r"So \boxed{\text{(B)}}", {"A": "red", "B": "blue"}, "boxed")
    'B'
    >>> chosen(r"\boxed{A, B}", {"A": "red", "B": "blue"}, "lenient")
    """
    answer = answer[-_LONGEST:]
    if mode == "regex":
        found = _last_match(answer, compiled(pattern or ""))
    elif mode == "line":
        lines = _LINE.findall(answer)
        found = lines[-1].strip().strip("*_`$ ") if lines else None
        boxed = last_boxed(found or "")
        found = boxed if boxed is not None else found
    else:
        found = last_boxed(answer)
    if found is None:
        return None
    named = _unwrapped(found)
    letter = _labelled(named, options, any_case=mode in ("line", "regex"))
    return letter or (_by_text(named, options) if mode != "boxed" else None)


def compiled(pattern: str) -> "regex.Pattern[str]":
    """Return the pattern, which ignores case. Raises ``DataError`` for one that can't be read."""
    try:
        return regex.compile(pattern, regex.IGNORECASE)
    except regex.error as error:
        raise DataError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _last_match(answer: str, pattern: "regex.Pattern[str]") -> str | None:
    matches = [*pattern.finditer(answer, timeout=_SECONDS, concurrent=True)]
    if not matches:
        return None
    group = 1 if pattern.groups else 0
    found, rest = (matches[-1][group] or "").strip(), answer[matches[-1].end(group) :]
    if len(found) == 1 and (rest[:1].isalnum() or _ALTERNATIVE.match(rest)):
        return None  # the first letter of a word, or of several letters
    return found


def _labelled(text: str, options: Mapping[str, str], any_case: bool) -> str | None:
    match = _LABEL.fullmatch(text)
    letter = match[1].upper() if match else ""
    if match is None or letter not in options or not (any_case or match[1].isupper()):
        return None
    rest = match[2] or ""
    exact = [key for key, option in options.items() if option == rest]
    if not rest or letter in exact or (not exact and plain(rest) == plain(options[letter])):
        return letter
    others = {plain(option) for key, option in options.items() if key != letter}
    more = set(re.findall(r"\b[A-Z]\b", rest)) & options.keys() - {letter}
    return None if exact or more or plain(rest) in others or plain(text) in others else letter


def _by_text(text: str, options: Mapping[str, str]) -> str | None:
    exact = [letter for letter, option in options.items() if option == text]
    same = exact or [letter for letter, option in options.items() if plain(option) == plain(text)]
    return same[0] if len(same) == 1 else None


def _unwrapped(text: str) -> str:
    while match := _WRAPPER.fullmatch(text.strip()):
        text = match[1]
    return text.strip()


def plain(text: str) -> str:
    """Return the text for comparison: without case, and without spacing, quotes, maths mode and points around it."""
    return " ".join(text.casefold().split()).strip(string.whitespace + "\"'`$*_.,;:!?")
