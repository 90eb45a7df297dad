"""Experts as text beside spans: the way there and back, and which note counts."""

import numpy as np

from whet.core.expert_ids import complete, of_tokens, read, unknown, written
from whet.core.types import Span


def test_ids_are_read_as_they_were_written() -> None:
    ids = np.arange(-1, 23, dtype=np.int16).reshape(4, 3, 2)
    assert np.array_equal(read(written(ids)), ids)
    assert read(written(ids[:0])).shape == (0, 3, 2)


def test_the_first_note_counts_and_only_what_has_none_is_completed() -> None:
    first, later = np.full((2, 1, 2), 5, np.int16), np.arange(12, dtype=np.int16).reshape(6, 1, 2)
    first[1] = -1
    spans = [Span([1, 2], False), Span([3, 4], True, experts=written(first)), Span([], False), Span([5, 6], True)]
    complete(spans, later)
    found = of_tokens(spans)
    assert found is not None
    assert found[:, 0].tolist() == [[0, 1], [2, 3], [5, 5], [6, 7], [8, 9], [10, 11]]


def test_spans_without_notes_are_unknown_beside_those_that_have_some() -> None:
    ids = np.ones((1, 3, 2), np.int16)
    assert of_tokens([Span([1, 2], False)]) is None
    found = of_tokens([Span([1, 2], False), Span([3], True, experts=written(ids))])
    assert np.array_equal(found, np.concatenate([unknown(2, (3, 2)), ids]))
