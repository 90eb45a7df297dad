"""Makes text from a model safe to look at: control characters become visible, whatever shows them.

Model output is not trusted: an escape sequence can rewrite a terminal, a direction override can turn a line around.
Escaping for HTML is done where HTML is written.
"""

import re

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with every control, direction and zero-width character (but newline and tab) written as an escape.

    >>> visible("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return _INVISIBLE.sub(lambda match: match.group().encode("unicode_escape", "backslashreplace").decode(), text)
