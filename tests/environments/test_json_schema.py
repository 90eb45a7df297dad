"""A strict schema lets nothing through that it doesn't describe, in whatever place it describes it."""

import pytest
from jsonschema import Draft202012Validator

from whet.environments.json_schema import strict_schema

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}
PERSON = {"$ref": "#/$defs/person"}
PEOPLE = {"$defs": {"person": {"type": "object", **A}}}
TREE = {"properties": {"value": {}, "children": {"type": "array", "items": {"$ref": "#"}}}}


def fits(schema, value):
    return Draft202012Validator(strict_schema(schema)).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", **A}, [{"a": 1}], [{}, {"a": 1, "zzz": 1}, {"zzz": 1}, {"a": "1"}, []]),
        ({"type": "object", **A, "required": [], "additionalProperties": True}, [{"a": 1}], [{}, {"a": 1, "z": 1}]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": "x"}], [{}, {"zzz": 1}, {"a": 1, "zzz": 1}, {"a": 1, "b": "x"}]),
        ({"oneOf": [A, B]}, [{"a": 1}, {"b": "x"}], [{}, {"zzz": 1}, {"a": 1, "zzz": 1}]),
        ({"allOf": [A, B]}, [{"a": 1, "b": "x"}], [{}, {"a": 1}, {"a": 1, "b": "x", "zzz": 1}]),
        ({"allOf": [{"allOf": [A]}, B]}, [{"a": 1, "b": "x"}], [{"b": "x"}, {"a": 1, "b": "x", "zzz": 1}]),
        (
            {**A, "anyOf": [B, {"properties": {"c": {}}}]},
            [{"a": 1, "b": "x"}, {"a": 1, "c": 0}],
            [{"a": 1}, {"b": "x"}],
        ),
        ({"anyOf": [{"anyOf": [A]}, B]}, [{"a": 1}], [{}, {"zzz": 1}, {"a": 1, "zzz": 1}]),
        ({"type": "array", "items": A}, [[], [{"a": 1}]], [[{}], [{"a": 1, "zzz": 1}], [{"zzz": 1}]]),
        ({"type": "array", "items": {"anyOf": [A, B]}}, [[{"b": "x"}]], [[{}], [{"zzz": 1}]]),
        ({"prefixItems": [A, B]}, [[{"a": 1}, {"b": "x"}]], [[{}, {"b": "x"}], [{"a": 1}, {"zzz": 1}]]),
        ({"items": [A, B], "additionalItems": False}, [[{"a": 1}, {"b": "x"}]], [[{}], [{"a": 1}, {"b": "x"}, 1]]),
        ({**PEOPLE, **PERSON}, [{"a": 1}], [{}, {"zzz": 1}, {"a": 1, "zzz": 1}]),
        ({**PEOPLE, "type": "array", "items": PERSON}, [[{"a": 1}]], [[{}], [{"a": 1, "zzz": 1}]]),
        ({**PEOPLE, "allOf": [PERSON, B]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"a": 1, "b": "x", "zzz": 1}]),
        ({**PEOPLE, "anyOf": [PERSON, {"type": "null"}]}, [{"a": 1}, None], [{}, {"zzz": 1}]),
        (TREE, [{"value": 1, "children": [{"value": 2, "children": []}]}], [{"value": 1, "children": [{"value": 2}]}]),
        ({"additionalProperties": A}, [{"x": {"a": 1}}], [{"x": {}}, {"x": {"zzz": 1}}]),
        ({"properties": {"items": {"type": "object", **A}}}, [{"items": {"a": 1}}], [{"items": {}}]),
        ({"$defs": {"any": {"type": "object"}}, "$ref": "#/$defs/any"}, [{}, {"x": 1}], [1]),
        ({"type": "object"}, [{}, {"x": 1}], [1]),
    ],
)
def test_what_a_schema_describes_is_required_and_nothing_else_is_allowed(schema, good, bad):
    for value in good:
        assert fits(schema, value), value
    for value in bad:
        assert not fits(schema, value), value


def deep(levels):
    schema = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "Expecting"),
        ("[1]", "no JSON object"),
        ({"type": "objekt"}, "no JSON schema"),
        ({"properties": 3}, "no JSON schema"),
        ({"$ref": "http://example.org/schema.json"}, "must lead to a place in the schema"),
        ({"$ref": "file:///etc/passwd"}, "must lead to a place in the schema"),
        ({"$ref": "#/$defs/nobody"}, "leads nowhere"),
        ({"$ref": "#"}, "without end"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "without end"),
        (deep(5000), "nested too deeply"),
    ],
)
def test_a_schema_that_cannot_be_used_says_why_before_anything_is_graded(schema, says):
    with pytest.raises(ValueError, match=says):
        strict_schema(schema)
