"""Rows that were seen before: equal ones by hash, similar ones by MinHash. Both keep hashes of 16 bytes in one block of
memory, which is made for the number of rows: 24 bytes for each row, and with MinHash for each row and band.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from whet.base.extras import extra
from whet.core.content import words_of
from whet.core.words import composed, words_in

_WORDS = 5  # in a sequence
_PERMUTATIONS = 128
_KEY = 16  # bytes
_FREE = bytes(_KEY)
_ROOM = 1.5  # slots for each key; searches get long in a table that is almost full

Seen = Callable[[str, str, Callable[[], str]], bool]
"""The key of a question, the key of the whole row and a function that returns its text -> whether such a row was seen
before."""


def key_of(value: object) -> str:
    """Return a hash of a JSON value in the form of ``comparable``."""
    text = json.dumps(comparable(value), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=_KEY).hexdigest()


def comparable(value: object) -> object:
    """Return a JSON value in a form that is equal for values that count as equal: texts in lower case, with composed
    accents and single spaces, parts of text as one text, objects in the order of their keys, without null ones."""
    if isinstance(value, str):
        return " ".join(composed(value.lower()).split())
    if isinstance(value, dict):
        return {name: comparable(value[name]) for name in sorted(value) if value[name] is not None}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return comparable(words_of(value))
    return [comparable(part) for part in value]


class Keys:
    """A set of at most ``most`` keys in a block of memory: a hash table with linear probing."""

    def __init__(self, most: int) -> None:
        self._slots = int(most * _ROOM) + 1
        self._table = bytearray(self._slots * _KEY)

    def __contains__(self, key: bytes) -> bool:
        return self._find(key)[1] == key

    def add(self, key: bytes) -> bool:
        """Add a key; return whether it was there before."""
        place, content = self._find(key)
        self._table[place : place + _KEY] = key
        return content == key

    def _find(self, key: bytes) -> tuple[int, bytes]:
        """Return the place of the key, or a free one, and what it holds."""
        slot = int.from_bytes(key[:8]) % self._slots
        while True:
            place = slot * _KEY
            content = bytes(self._table[place : place + _KEY])
            if content in (key, _FREE):
                return place, content
            slot = (slot + 1) % self._slots


def seen_before(how: str, near: float, rows: int) -> Seen:
    """Return the check for a setting of ``PrepConfig.duplicates``, for at most ``rows`` rows. Raises
    ``MissingExtraError`` without datasketch."""
    if how == "keep":
        return lambda question, whole, text: False
    if how == "drop_near":
        return _near(near, rows)
    keys, by_question = Keys(rows), how == "drop_questions"
    return lambda question, whole, text: keys.add(bytes.fromhex(question if by_question else whole))


def _near(threshold: float, rows: int) -> Seen:
    with extra("data", "duplicates=drop_near"):
        from datasketch import MinHash, MinHashLSH

    index: Any = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS)  # chooses the bands; it would keep them whole
    bands = [slice(band * index.r, (band + 1) * index.r) for band in range(index.b)]
    keys = Keys(rows * len(bands))

    def seen(question: str, whole: str, text: Callable[[], str]) -> bool:
        words = words_in(composed(text().lower()))
        sequences = {" ".join(words[i : i + _WORDS]) for i in range(max(1, len(words) - _WORDS + 1))}
        signature = MinHash(num_perm=_PERMUTATIONS)
        signature.update_batch([sequence.encode() for sequence in sequences])
        own_keys = [
            hashlib.blake2b(signature.hashvalues[band].tobytes(), digest_size=_KEY, salt=bytes([number])).digest()
            for number, band in enumerate(bands)
        ]
        if any(key in keys for key in own_keys):
            return True
        for key in own_keys:
            keys.add(key)
        return False

    return seen
