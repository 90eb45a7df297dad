"""Words of a text, for counts and comparisons in any language."""

import re
import unicodedata

_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


def composed(text: str) -> str:
    """Return a text with each accent in its letter, Unicode's form NFC, so that texts which look alike are equal.

    >>> len("Cafe\u0301"), len(composed("Cafe\u0301"))
    (5, 4)
    """
    return unicodedata.normalize("NFC", text)


def words_in(text: str) -> list[str]:
    """Return what stands between spaces, and each Chinese character by itself, as no spaces are between words there.

    >>> words_in("two words, 三个字")
    ['two', 'words,', '三', '个', '字']
    """
    return _IDEOGRAPH.sub(r" \g<0> ", text).split()
