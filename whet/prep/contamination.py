"""Rows that share text with an evaluation set: a sequence of words in common, as in the decontamination of GPT-3
(arXiv 2005.14165, appendix C)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from whet.core.words import composed, words_in
from whet.data.files import iterate_file

if TYPE_CHECKING:
    from whet.data.row_kinds import Example

_WORD = re.compile(r"\w+")


class Contamination:
    """The word sequences of evaluation sets."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._sequences: dict[int, set[tuple[str, ...]]] = {}  # length -> sequences

    @classmethod
    def of_files(cls, paths: Iterable[str], ngram: int) -> "Contamination":
        """Read the texts of evaluation files. Raises ``DataError`` for a file that can't be read."""
        contamination = cls(ngram)
        for path in paths:
            for _, row in iterate_file(path, nan_is_null=True):
                for text in texts_of(row):
                    contamination.add(text)
        return contamination

    def add(self, text: str) -> None:
        """Add a text. One with fewer than three words, such as an answer, is ignored: it is in most rows."""
        words = _words(text)
        if len(words) < 3:
            return
        length = min(len(words), self._ngram)
        self._sequences.setdefault(length, set()).update(_sequences(words, length))

    def found_in(self, texts: Iterable[str]) -> bool:
        """Return whether the texts of a row have a word sequence in common with an evaluation text."""
        if not self._sequences:
            return False
        words = _words("\n".join(texts))
        return any(not present.isdisjoint(_sequences(words, length)) for length, present in self._sequences.items())


def compared_fields(kind: "type[Example]", output: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a row in which duplicates and evaluation text are looked for."""
    return {name: output[name] for name in kind.compared or (*kind.fields, "tools") if name in output}


def texts_of(value: object) -> Iterator[str]:
    """Yield all texts in a JSON value but the data URLs of images."""
    if isinstance(value, str):
        if not value.startswith("data:image/"):
            yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


def _words(text: str) -> list[str]:
    return _WORD.findall(" ".join(words_in(composed(text.lower()))))


def _sequences(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))
