r"""Which of the offered letters an answer names. Knows no task and no file.

An answer names one option or none: two letters, a letter beside another option's text, and a letter that isn't offered
are no answer.
"""

import re
import string
from collections.abc import Mapping
from typing import Literal

from whet.base.errors import DataError
from whet.base.extras import extra
from whet.tasks.math.grader import last_boxed

with extra("tasks", "data.type=multiple_choice"):
    import regex

Mode = Literal["boxed", "lenient", "line", "regex"]

_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathsf|mathit|mathtt|boldsymbol|bm)\s*\{(.*)\}",
    re.DOTALL,
)
_INNER = re.compile(r"\\(?:text|textbf|textrm|mathrm)\s*\{([^{}]*)\}")
_SWITCH = re.compile(r"\{?\s*\\(?:bf|it|rm|sf|tt|bfseries|itshape)\b\s*(.*?)\}?", re.DOTALL)
_CALLED = re.compile(
    r"(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)(?:\s+is)?\s*:?\s+(?=\W*[A-Za-z]\b)", re.IGNORECASE
)
_LABEL = re.compile(r"[^\w\\]*([A-Za-z])(?:[^\w\\]*|[^\w\\]*?[:).\]\-]\s*(.*))", re.DOTALL)  # B, (B), B: text
_MARKS = " \t\"'*_`#>-.:$()[]"  # around a letter or the word before it
_MARKS = " \t\"'*_`#>-.:$()[]"  # around the word before a letter
_LINE = re.compile(
    r"(?:(?:so|thus|therefore|hence)\b,?\s+)?(?:the\s+)?(?:(?:final|correct|right|best)\s+)?"
    r"answer(?:\s+is)?[ \t*_]{0,8}:(.*)",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(
    r"[ )\]}*$\"']{0,8}(?:(?:[/|,&;+]|\b(?:or|and|and/or)\b)\s{0,8}\(?[A-Za-z]\b(?!')|\(?(?-i:[A-HJ-Z])\b)",
    re.IGNORECASE,
)
_A_WORD = re.compile(r"(?:a|I) [a-z]{2}")  # "a guess", "I think"
_WITH_REASON = re.compile(r"\W*([A-Za-z])\W?,?\s+(?:because|since|as|for)\b", re.IGNORECASE)
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
        found = _last_line(answer)
        boxed = last_boxed(found or "")
        found = boxed if boxed is not None else found
    else:
        found = last_boxed(answer)
    if found is None:
        return None
    named = _unwrapped(found)
    if mode != "regex":
        named = _CALLED.sub("", named, count=1) if _CALLED.match(named) else named
    if mode in ("line", "regex") and (reason := _WITH_REASON.match(named)):
        named = reason[1]
    letter = _labelled(named, options, any_case=mode in ("line", "regex"))
    return letter or (_by_text(named, options) if mode != "boxed" else None)


def compiled(pattern: str) -> "regex.Pattern[str]":
    """Return the pattern, which ignores case. Raises ``DataError`` for one that can't be read."""
    try:
        return regex.compile(pattern, regex.IGNORECASE)
    except regex.error as error:
        raise DataError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _last_line(answer: str) -> str | None:
    """What follows the last ``Answer:``, on its line or the next one."""
    lines = [line for line in answer.splitlines() if line.strip()]
    for index in reversed(range(len(lines))):
        if match := _LINE.match(lines[index].replace("*", "").lstrip(_MARKS)):
            said = match[1].strip().strip("*_`$ ") or (lines[index + 1].strip() if index + 1 < len(lines) else "")
            return said.strip("*_`$ ")
    return None


def _last_match(answer: str, pattern: "regex.Pattern[str]") -> str | None:
    matches = [*pattern.finditer(answer, timeout=_SECONDS, concurrent=True)]
    if not matches:
        return None
    group = 1 if pattern.groups else 0
    found, rest = (matches[-1][group] or "").strip(), answer[matches[-1].end(group) :]
    if len(found) == 1 and (rest[:1].isalnum() or _ALTERNATIVE.match(rest) or _A_WORD.match(found + rest)):
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
    while match := _WRAPPER.fullmatch(text.strip()) or _SWITCH.fullmatch(text.strip()):
        text = match[1]
    text = " ".join(_INNER.sub(r"\1", text).split()) if "\\" in text else text.strip()
    if match := re.fullmatch(r"([A-Z]) \((.*)\)", text, re.DOTALL):
        return f"{match[1]}: {match[2]}"
    return text


def plain(text: str) -> str:
    """Return the text for comparison: without case, and without spacing, quotes, maths mode and points around it."""
    return " ".join(text.casefold().split()).strip(string.whitespace + "\"'`$*_.,;:!?")
