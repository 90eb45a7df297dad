"""Rows that were seen before: equal ones by hash, similar ones by MinHash. Memory: 16 bytes and the overhead of a set
for each row; MinHash keeps a signature for each row.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from whet.base.extras import extra

_WORDS = 5  # in a sequence
_PERMUTATIONS = 128

Seen = Callable[[str, str], bool]
"""A question and the text of its row -> whether such a row was seen before."""


def normalized(text: str) -> str:
    """Return the text in lower case with single spaces."""
    return " ".join(text.lower().split())


def seen_before(how: str, near: float) -> Seen:
    """Return the check for a setting of ``PrepConfig.duplicates``. Raises ``MissingExtraError`` without datasketch."""
    if how == "keep":
        return lambda question, text: False
    if how == "drop_near":
        return _near(near)
    hashes = set[bytes]()

    def seen(question: str, text: str) -> bool:
        key = hashlib.blake2b(normalized(question if how == "drop_questions" else text).encode(), digest_size=16)
        size = len(hashes)
        hashes.add(key.digest())
        return len(hashes) == size

    return seen


def _near(threshold: float) -> Seen:
    with extra("data", "duplicates=drop_near"):
        from datasketch import MinHash, MinHashLSH

    index: Any = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS)
    count = 0

    def seen(question: str, text: str) -> bool:
        nonlocal count
        words = normalized(text).split()
        sequences = {" ".join(words[i : i + _WORDS]) for i in range(max(1, len(words) - _WORDS + 1))}
        signature = MinHash(num_perm=_PERMUTATIONS)
        signature.update_batch([sequence.encode() for sequence in sequences])
        if index.query(signature):
            return True
        index.insert(count, signature)
        count += 1
        return False

    return seen
