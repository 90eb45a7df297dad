"""Readers of JSON, YAML, TOML, XML and CSV. Called in worker processes, because models write the texts."""

import csv
import io
import json
import re
import tomllib
from datetime import date, time
from typing import Literal
from xml.etree import ElementTree

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from whet.base.strict_json import STRICT, JsonObject
from whet.tasks.structured.converted import as_schema, resolved

Format = Literal["json", "yaml", "toml", "xml", "csv"]

_DECLARATION = re.compile(r"<!(?!--|\[CDATA\[)")
_FENCED = re.compile(r"(`{3,}|~{3,})[\w+.-]*[ \t]*\r?\n(.*?)(?:\r?\n)?[ \t]*\1", re.DOTALL)


def parse(text: str, form: Format, schema: JsonObject) -> object:
    """Return the JSON value of a text. The texts of XML and CSV become numbers and booleans where the schema has them.
    Raises exceptions of many kinds for a text that can't be parsed."""
    if form == "json":
        return STRICT.decode(text)
    if form == "xml":
        return as_schema(_of_xml(text, resolved(schema, schema)), schema)
    if form == "csv":
        return as_schema(_of_csv(text, resolved(schema, schema)), schema)
    value = tomllib.loads(text) if form == "toml" else _of_yaml(text)
    return STRICT.decode(json.dumps(value, default=_text_of_date, allow_nan=False))


def unfenced(text: str) -> str:
    """Return the contents of the fence if the text is one fenced block, else the text."""
    match = _FENCED.fullmatch(text.strip())
    return match[2] if match else text


class _Constructor(SafeConstructor):
    """Makes dates and times of YAML the texts that were written, which is what JSON has for them."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _text_of_date(value: object) -> str:
    """Return the text of a date or time of TOML as RFC 3339 writes it."""
    if not isinstance(value, date | time):
        raise TypeError(f"{type(value).__name__} is not a value of JSON")
    return value.isoformat().replace("+00:00", "Z")


def _of_yaml(text: str) -> object:
    yaml, depth = YAML(typ="safe", pure=True), 0
    yaml.Constructor = _Constructor
    for event in yaml.parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if isinstance(event, AliasEvent) or depth > 100:
            raise ValueError(
                "YAML with aliases or more than 100 levels is refused, because it can expand without bound"
            )
    return yaml.load(text)


def _of_xml(text: str, schema: JsonObject) -> object:
    if _DECLARATION.search(text):
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


def _of_csv(text: str, schema: JsonObject) -> object:
    header, *rows = filter(None, csv.reader(io.StringIO(text.strip()), strict=True))
    if len(set(header)) != len(header) or any(len(row) != len(header) for row in rows):
        raise ValueError("every row must have a value for each of the header's names")
    objects = [dict(zip(header, row, strict=True)) for row in rows]
    if schema.get("type") != "object":
        return objects
    properties = schema.get("properties", {})
    if len(properties) == 1 and set(header) != set(properties):  # {"people": [{"name": ...}]}
        return dict.fromkeys(properties, objects)
    return objects[0] if len(objects) == 1 else objects
