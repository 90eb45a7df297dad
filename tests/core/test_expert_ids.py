"""Expert ids stored as text with spans: round trips, and which ids take precedence."""

import numpy as np

from whet.core.expert_ids import decode, encode, experts_per_token, fill_missing, unknown
from whet.core.types import Span


def test_ids_survive_encoding() -> None:
    ids = np.arange(-1, 23, dtype=np.int16).reshape(4, 3, 2)
    assert np.array_equal(decode(encode(ids)), ids)
    assert decode(encode(ids[:0])).shape == (0, 3, 2)


def test_existing_ids_stay_and_only_missing_ones_are_filled() -> None:
    first, later = np.full((2, 1, 2), 5, np.int16), np.arange(12, dtype=np.int16).reshape(6, 1, 2)
    first[1] = -1
    spans = [Span([1, 2], False), Span([3, 4], True, experts=encode(first)), Span([], False), Span([5, 6], True)]
    fill_missing(spans, later)
    found = experts_per_token(spans)
    assert found is not None
    assert found[:, 0].tolist() == [[0, 1], [2, 3], [5, 5], [6, 7], [8, 9], [10, 11]]


def test_spans_without_ids_are_unknown_if_other_spans_have_ids() -> None:
    ids = np.ones((1, 3, 2), np.int16)
    assert experts_per_token([Span([1, 2], False)]) is None
    found = experts_per_token([Span([1, 2], False), Span([3], True, experts=encode(ids))])
    assert np.array_equal(found, np.concatenate([unknown(2, (3, 2)), ids]))
