import json

import pytest

from whet.base.strict_json import MOST_LEVELS, STRICT, TABLES


def nested(levels: int, opening: str, closing: str) -> str:
    return opening * levels + "1" + closing * levels


@pytest.mark.parametrize("decoder", [STRICT, TABLES])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}"), ('{"b": 0, "a": [', "]}")])
def test_deep_values_are_refused_on_every_version_of_python(decoder, opening, closing):
    most = MOST_LEVELS // (opening.count("[") + opening.count("{"))
    text = nested(most, opening, closing)
    assert decoder.decode(text) == json.loads(text)
    for levels in (most + 1, 600, 3_000, 100_000):
        with pytest.raises(ValueError, match="more than 100 levels"):
            decoder.decode(nested(levels, opening, closing))


def test_wide_values_and_brackets_in_texts_are_not_deep():
    wide = [[{"a": [number]}] for number in range(500)]
    assert STRICT.decode(json.dumps(wide)) == wide
    assert STRICT.decode(json.dumps("[" * 500)) == "[" * 500
    assert STRICT.raw_decode('{"a": 1} ' + "[" * 500) == ({"a": 1}, 8)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[NaN]", "[Infinity]", "1e999"])
def test_duplicate_keys_and_numbers_that_are_not_finite_are_refused(text):
    with pytest.raises(ValueError, match=r"duplicate key 'a'|not a finite number"):
        STRICT.decode(text)


def test_tables_read_nan_as_null():
    assert TABLES.decode("[NaN, 1]") == [None, 1]
