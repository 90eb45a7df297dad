"""Makes model output safe to display: control and invisible characters are written as escapes.

Model output is not trusted: an escape sequence can rewrite the terminal, a direction override can reverse a line, and
zero-width characters can hide a message. HTML is escaped where it is written.
"""

import re
import unicodedata

_NOT_PLAIN = re.compile("[^\n\t -~]")
# Control, format (directions, joiners, no width), surrogate, private, unassigned; separators of lines and paragraphs.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# Letters and marks by category, yet blank: fillers, and variation selectors other than text and emoji style.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0d\uffa0\U000e0100-\U000e01ef]"
)


def escape_controls(text: str) -> str:
    """Return the text with every invisible character except newline, tab and space written as an escape.

    >>> escape_controls("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return _NOT_PLAIN.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    character = match.group()
    if unicodedata.category(character) in _HIDDEN or _BLANK.match(character):
        return character.encode("unicode_escape", "backslashreplace").decode()
    return character
