"""A strict schema rejects everything that it doesn't describe, at every level."""

import json

import pytest

from whet.tasks.structured.json_schema import fits, open_schema, strict_schema

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}
PERSON = {"$ref": "#/$defs/person"}
PEOPLE = {"$defs": {"person": {"type": "object", **A}}}
TREE = {"properties": {"value": {}, "children": {"type": "array", "items": {"$ref": "#"}}}}


def accepts(schema, value):
    given = json.loads(schema) if isinstance(schema, str) else schema
    return fits(value, strict_schema(schema), open_schema(given))


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
def test_every_described_property_is_required_and_no_other_allowed(schema, good, bad):
    for value in good:
        assert accepts(schema, value), value
    for value in bad:
        assert not accepts(schema, value), value


def deep(levels):
    schema = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "Expecting"),
        ("[1]", "not a JSON object"),
        ({"type": "objekt"}, "not a JSON schema"),
        ({"properties": 3}, "not a JSON schema"),
        ({"$ref": "http://example.org/schema.json"}, "must lead to a place in the schema"),
        ({"$ref": "file:///etc/passwd"}, "must lead to a place in the schema"),
        ({"$ref": "#/$defs/missing"}, "leads nowhere"),
        ({"$ref": "#"}, "without end"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "without end"),
        (deep(5000), "nested too deeply"),
    ],
)
def test_an_invalid_schema_is_an_error_before_grading(schema, says):
    with pytest.raises(ValueError, match=says):
        strict_schema(schema)


ONE = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "bad"),
    [
        ({"properties": {"a": {}, "b": {}},
          "dependentSchemas": {"a": {"properties": {"a": {}}, "additionalProperties": False}}}, {"a": 1, "b": 2}),
        ({"$defs": {"one": ONE}, "oneOf": [{"$ref": "#/$defs/one"}, {"oneOf": [{"$ref": "#/$defs/one"}]}]}, {"a": 1}),
        ({"$defs": {"one": ONE}, "oneOf": [{"$ref": "#/$defs/one"}, {"allOf": [ONE]}]}, {"a": 1}),
        ({"properties": {"a": {}, "b": {}}, "dependencies": {"a": ["c"]}}, {"a": 1, "b": 2}),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {}, "b": {}},
          "dependencies": {"a": {"properties": {"b": {"type": "string"}}}}}, {"a": 1, "b": 2}),
    ],
)  # fmt: skip
def test_values_that_the_original_schema_refuses_are_refused(schema, bad):
    assert not accepts(schema, bad)


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"enum": [{"$ref": "nowhere"}, 1]}, 1),
        ({"properties": {"a": {"default": {"$ref": "http://x.test"}, "examples": [{"$ref": 1}]}}}, {"a": 1}),
        ({"const": {"$ref": "#/no"}}, {"$ref": "#/no"}),
        ({"properties": {"$ref": {"type": "string"}}}, {"$ref": "x"}),
        ({"$defs": {"a b": ONE, "c/d": ONE, "e%f": ONE}, "$ref": "#/$defs/a%20b"}, {"a": 1}),
        ({"$defs": {"c/d": ONE}, "$ref": "#/$defs/c~1d"}, {"a": 1}),
        ({"$defs": {"e%f": ONE}, "$ref": "#/$defs/e%25f"}, {"a": 1}),
        ({"items": [{"type": "integer"}], "additionalItems": False}, [1]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://x.test/y", "definitions": {"one": ONE},
          "$ref": "#/definitions/one"}, {"a": 1}),
    ],
)  # fmt: skip
def test_references_are_followed_but_not_in_values(schema, good):
    assert accepts(schema, good)


@pytest.mark.parametrize("where", ["not", "if", "propertyNames", "dependentSchemas", "dependencies", "anyOf"])
def test_references_out_of_the_schema_are_refused_at_every_level(where):
    out = {"$ref": "http://127.0.0.1:9/schema"}
    value = {"a": out} if where.startswith("depend") else [out] if where == "anyOf" else out
    with pytest.raises(ValueError, match="must lead to a place in the schema"):
        strict_schema({where: value})
