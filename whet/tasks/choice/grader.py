r"""The option that an answer chooses.

An answer that names two letters, a letter with another option's text, or a letter without an option chooses none.
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
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathsf|mathit|mathtt|boldsymbol|bm"
    r"|(?:text)?color\{\w+\})\s*\{(.*)\}",
    re.DOTALL,
)
_INNER = re.compile(r"\\(?:text|textbf|textrm|mathrm)\s*\{([^{}]*)\}")
_IN_MATHS = re.compile(r"\\\(\s*([A-Za-z])\s*\\\)(.*)", re.DOTALL)  # \(B\)
_SPACED = re.compile(r"\(?([A-Za-z])\)?,?\s+(.*)", re.DOTALL)  # B blue, or B, blue
_SWITCH = re.compile(r"\{?\s*\\(?:bf|it|rm|sf|tt|bfseries|itshape)\b\s*(.*?)\}?", re.DOTALL)
_CALLED = re.compile(
    r"(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)(?:\s+is)?\s*:?\s+(?=\W*[A-Za-z]\b)", re.IGNORECASE
)
_LABEL = re.compile(r"[^\w\\]*([A-Za-z])(?:[^\w\\]*|[^\w\\]*?[:).\]\-–—]\s*(.*))", re.DOTALL)  # B, (B), B: text
_MARKS = " \t\"'*_`#>-.:$()[]"  # before the word "answer"
_LINE = re.compile(
    r"(?:(?:so|thus|therefore|hence)\b,?\s+)?(?:the\s+)?(?:(?:final|correct|right|best)\s+)?"
    r"answer(?:\s+is)?[ \t*_]{0,8}[:\uff1a](.*)",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(
    r"[ )\]}*$\"']{0,8}(?:(?:[/|,&;+]|\(?\b(?:(?:or|and|and/or)(?: also)?|as well as|versus|vs)\b)\.?\s{0,8}"
    r"\(?[A-Za-z]\b(?!')|\(?(?-i:[A-HJ-Z])\b|[-\u2013\u2014]\s{0,8}\(?(?-i:[A-HJ-Z]\b(?! [a-z])))",
    re.IGNORECASE,
)
_A_WORD = re.compile(r"(?:a|I) [a-z]{2}")  # "a guess", "I think"
_WHY = r"\W?,?\s+(because|since|as(?! (?:well|much) as)|for)\b"
_WITH_REASON = re.compile(rf"\W*([A-Za-z]){_WHY}(.*)", re.IGNORECASE | re.DOTALL)
_REASONED = re.compile(rf"\b([A-Z])\b{_WHY}", re.IGNORECASE)
_LETTER = re.compile(r"\b([A-HJ-Z]|I(?! [a-z]))\b")
_LONGEST = 20_000  # characters, the last ones of an answer, in which the letter is looked for
_SECONDS = 1.0  # limit of one search with a user's pattern


def chosen(answer: str, options: Mapping[str, str], mode: Mode, pattern: str | None = None) -> str | None:
    r"""Return the letter of the option that the answer chooses; None if it names none or more than one.

    ``boxed``: the last ``\boxed{}`` holds a letter, or a letter and its option's text. ``lenient``: as ``boxed``, or an
    option's text alone if no other option has the same. ``line``: as ``lenient``, after the last ``Answer:``.
    ``regex``: as ``lenient``, in the first group of the last match of ``pattern``. Raises ``TimeoutError`` if the
    search takes longer than a second.

    >>> chosen(r"So \boxed{\text{(B)}}", {"A": "red", "B": "blue"}, "boxed")
    'B'
    >>> chosen(r"\boxed{A, B}", {"A": "red", "B": "blue"}, "lenient")
    """
    answer = answer[-_LONGEST:]
    if mode == "regex":
        text = _last_match(answer, compiled(pattern or ""), options)
    elif mode == "line":
        text = _last_line(answer)
        boxed = last_boxed(text or "")
        text = boxed if boxed is not None else text
    else:
        text = last_boxed(answer)
    if text is None:
        return None
    named = _unwrapped(text)
    if mode != "regex":
        named = _CALLED.sub("", named, count=1) if _CALLED.match(named) else named
    if mode in ("line", "regex") and (reason := _WITH_REASON.match(named)):
        if _is_one_of_several(reason, options):
            return None
        named = reason[1]
    letter = _labelled(named, options, any_case=mode in ("line", "regex"))
    return letter or (_by_text(named, options) if mode != "boxed" else None)


def _is_one_of_several(reason: re.Match[str], options: Mapping[str, str]) -> bool:
    """Return whether a letter with a reason is one of several answers: "B because of x, C because of y", or "B for
    short texts, else C", where "for" begins a case in place of a reason."""
    others = [*_REASONED.finditer(reason[3]), *(_LETTER.finditer(reason[3]) if reason[2].lower() == "for" else ())]
    return any(match[1].upper() in options and match[1].upper() != reason[1].upper() for match in others)


def compiled(pattern: str) -> "regex.Pattern[str]":
    """Return the compiled pattern, which ignores case. Raises ``DataError`` for an invalid one."""
    try:
        return regex.compile(pattern, regex.IGNORECASE)
    except regex.error as error:
        raise DataError(f"the pattern {pattern!r} is not a regular expression: {error}") from None


def _last_line(answer: str) -> str | None:
    """Return the text after the last ``Answer:``, on its line or the next line."""
    lines = [line for line in answer.splitlines() if line.strip()]
    for index in reversed(range(len(lines))):
        if match := _LINE.match(lines[index].replace("*", "").lstrip(_MARKS)):
            text = match[1].strip().strip("*_`$ ") or (lines[index + 1].strip() if index + 1 < len(lines) else "")
            return text.strip("*_`$ ")
    return None


def _last_match(answer: str, pattern: "regex.Pattern[str]", options: Mapping[str, str]) -> str | None:
    matches = [*pattern.finditer(answer, timeout=_SECONDS, concurrent=True)]
    if not matches:
        return None
    group = 1 if pattern.groups else 0
    text, rest = (matches[-1][group] or "").strip(), answer[matches[-1].end(group) :]
    if len(text) == 1 and (rest[:1].isalnum() or _ALTERNATIVE.match(rest) or _A_WORD.match(text + rest)):
        return None  # the first letter of a word, or the first of several letters
    if len(text) == 1 and (reason := _WITH_REASON.match(text + rest.split("\n")[0])):
        return None if _is_one_of_several(reason, options) else text
    return text


def _labelled(text: str, options: Mapping[str, str], any_case: bool) -> str | None:
    """Return the letter of a text such as ``(B)`` or ``B: blue``; None if the rest contradicts it."""
    if (spaced := _SPACED.fullmatch(text)) and plain(text) not in map(plain, options.values()):
        same = plain(spaced[2]) == plain(options.get(spaced[1].upper(), ""))
        text = f"{spaced[1]}: {spaced[2]}" if same else text
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
    """Return the letter of the only option that has this text."""
    exact = [letter for letter, option in options.items() if option == text]
    same = exact or [letter for letter, option in options.items() if plain(option) == plain(text)]
    return same[0] if len(same) == 1 else None


def _unwrapped(text: str) -> str:
    r"""Return the text without LaTeX's font commands, with ``B (blue)`` written as ``B: blue``."""
    while match := _WRAPPER.fullmatch(text.strip()) or _SWITCH.fullmatch(text.strip()):
        text = match[1]
    if match := _IN_MATHS.fullmatch(text.strip()):
        text = match[1] + match[2]
    text = re.sub(r"\\q?quad(?![A-Za-z])", " ", text)
    text = " ".join(_INNER.sub(r"\1", text).split()) if "\\" in text else text.strip()
    if match := re.fullmatch(r"([A-Z]) \((.*)\)", text, re.DOTALL):
        return f"{match[1]}: {match[2]}"
    return text


def plain(text: str) -> str:
    """Return the text in lower case, without spacing, quotes, maths mode and points around it, for comparison."""
    return " ".join(text.casefold().split()).strip(string.whitespace + "\"'`$*_.,;:!?")
