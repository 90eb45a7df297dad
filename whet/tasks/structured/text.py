"""Readers of JSON, YAML, TOML, XML and CSV. Called in worker processes, because models write the texts."""

import csv
import io
import json
import re
import tomllib
from typing import Any, Literal
from xml.etree import ElementTree

from ruamel.yaml import YAML
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from whet.base.strict_json import STRICT, JsonObject
from whet.tasks.structured.json_schema import referred

Format = Literal["json", "yaml", "toml", "xml", "csv"]

_FENCED = re.compile(r"(`{3,}|~{3,})[\w+.-]*[ \t]*\r?\n(.*?)(?:\r?\n)?[ \t]*\1", re.DOTALL)


def parse(text: str, form: Format, schema: JsonObject) -> object:
    """Return the JSON value of a text. The texts of XML and CSV become numbers and booleans where the schema has them.
    Raises exceptions of many kinds for a text that can't be parsed."""
    if form == "json":
        return STRICT.decode(text)
    if form == "xml":
        return _as_schema(_of_xml(text, schema), schema, schema)
    if form == "csv":
        return _as_schema(_of_csv(text, schema), schema, schema)
    value = tomllib.loads(text) if form == "toml" else _of_yaml(text)
    return json.loads(json.dumps(value, default=str, allow_nan=False))  # dates become texts


def unfenced(text: str) -> str:
    """Return the contents of the fence if the text is one fenced block, else the text."""
    match = _FENCED.fullmatch(text.strip())
    return match[2] if match else text


def _of_yaml(text: str) -> object:
    yaml, depth = YAML(typ="safe", pure=True), 0
    for event in yaml.parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if isinstance(event, AliasEvent) or depth > 100:
            raise ValueError(
                "YAML with aliases or more than 100 levels is refused, because it can expand without bound"
            )
    return yaml.load(text)


def _of_xml(text: str, schema: JsonObject) -> object:
    if "<!" in text:
        raise ValueError("XML with declarations is refused, because its entities can expand without bound")
    root = ElementTree.fromstring(text.strip())
    value = _of_element(root)
    return {root.tag: value} if set(schema.get("properties", {})) == {root.tag} else value


def _of_element(element: ElementTree.Element) -> object:
    parts: JsonObject = {f"@{name}": value for name, value in element.attrib.items()}
    for child in element:
        parts.setdefault(child.tag, []).append(_of_element(child))
    texts = [part.strip() for part in (element.text, *(child.tail for child in element)) if part and part.strip()]
    if not parts:
        return " ".join(texts)
    more = {"#text": [" ".join(texts)]} if texts else {}
    return {name: value[0] if len(value) == 1 else value for name, value in (parts | more).items()}


def _of_csv(text: str, schema: dict[str, object]) -> object:
    header, *rows = csv.reader(io.StringIO(text.strip()), strict=True)
    if len(set(header)) != len(header) or any(len(row) != len(header) for row in rows):
        raise ValueError("every row must have a value for each of the header's names")
    objects = [dict(zip(header, row, strict=True)) for row in rows]
    return objects[0] if schema.get("type") == "object" and len(objects) == 1 else objects


def _as_schema(value: object, schema: Any, root: dict[str, object]) -> object:
    """Return the value with its texts converted to the types of the schema, and single items to lists."""
    schema = schema if isinstance(schema, dict) else {}
    if "$ref" in schema:
        schema = referred(schema["$ref"], root)
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if "array" in kinds and not isinstance(value, list):
        if isinstance(value, dict) and len(value) == 1:  # <tags><tag>a</tag><tag>b</tag></tags>
            value = next(iter(value.values()))
        value = value if isinstance(value, list) else [value] if value else []
    if isinstance(value, list):
        return [_as_schema(item, schema.get("items"), root) for item in value]
    if isinstance(value, dict):
        parts = schema.get("properties", {})
        return {name: _as_schema(item, parts.get(name), root) for name, item in value.items()}
    if isinstance(value, str) and kinds and "string" not in kinds:
        try:
            return STRICT.decode(value.strip().lower() or "null")
        except ValueError:
            return value
    return value
