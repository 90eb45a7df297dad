"""Reading YAML 1.2 into trees with line numbers, and writing it. Independent of recipes.

ruamel.yaml parses and writes; unquoted scalars are resolved here, by the core schema of YAML 1.2: ``1e-5`` is a number,
while ``no``, ``12:30`` and ``2024-01-01`` are strings.
"""

import math
import re
from io import StringIO

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode
from ruamel.yaml.nodes import Node as YamlNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from whet.base.strict_json import JsonObject
from whet.config.base import Config
from whet.config.issues import ConfigIssue, RecipeError
from whet.config.tree import Node, Path, dotted

_MOST_VALUES = 100_000  # counting each use of an alias
_DEEPEST = 50
_INT = re.compile(r"[-+]?[0-9]{1,400}|0o[0-7]{1,400}|0x[0-9a-fA-F]{1,300}")
_FLOAT = re.compile(r"(?![-+]?[0-9]+$)[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False, ".nan": math.nan}
_WORDS |= {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}
_BOOLEANS_OF_YAML_1_1 = ("y", "n", "yes", "no", "on", "off")
_CURES = {
    "'\\t'": "a tab; YAML allows only spaces for indentation",
    "mapping values": "a second ': ' on the line, or wrong indentation; put a text that contains ': ' in quotes",
    "cannot start any token": "{}; put a text that starts with it in quotes",
    "found another document": "a second document ('---'); a recipe is one document",
    "maximum depth": f"nested more than {_DEEPEST} deep",
}


def plain_value(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar."""
    lower = text.lower()
    if lower in _WORDS and text in (lower, lower.title(), lower.upper()):
        return _WORDS[lower]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def parse_yaml(text: str, source: str, issues: list[ConfigIssue], *, numbered: bool = True) -> Node | None:
    """Return the tree of a YAML text, or None if it is empty.

    The origin of each node is ``source:line``, or ``source`` if not ``numbered``. Duplicate keys, tags and invalid keys
    are added to ``issues``. Raises RecipeError if the text can't be parsed or has more than 100,000 values.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.max_depth = _Unresolved, _DEEPEST
    reading = _Reading(source, issues, numbered)
    try:
        root = yaml.compose(text)
    except ReaderError as error:
        where = reading.place(text.count("\n", 0, error.position))
        raise RecipeError([ConfigIssue("", where, f"the character {chr(error.character)!r} is not allowed")]) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise RecipeError([ConfigIssue("", reading.place(mark.line), f"not valid YAML: {_cure(error)}")]) from None
    return None if root is None else reading.convert(root, (), source)


def parse_mapping(text: str, source: str) -> JsonObject:
    """Return the plain values of a YAML mapping, {} for another text. Raises RecipeError for invalid YAML."""
    tree = parse_yaml(text, source, [])
    return tree.plain() if tree is not None and isinstance(tree.value, dict) else {}


class _Unresolved(VersionedResolver):
    """A resolver that leaves scalars unconverted; the tag is "plain" for unquoted ones."""

    def resolve(self, kind: type[YamlNode], value: str | None, implicit: tuple[bool, bool]) -> Tag:
        return Tag(suffix="plain" if kind is ScalarNode and implicit[0] else "")


class _Reading:
    """Converts ruamel's nodes to ``Node``."""

    def __init__(self, source: str, issues: list[ConfigIssue], numbered: bool) -> None:
        self.source, self.issues, self.numbered = source, issues, numbered
        self.values = 0

    def place(self, line: int) -> str:
        return f"{self.source}:{line + 1}" if self.numbered else self.source

    def complain(self, path: Path, node: YamlNode, message: str) -> None:
        self.issues.append(ConfigIssue(dotted(path), self.place(node.start_mark.line), message))

    def convert(self, node: YamlNode, path: Path, where: str) -> Node:
        self.values += 1
        if self.values > _MOST_VALUES:
            raise RecipeError([ConfigIssue("", self.source, f"more than {_MOST_VALUES:,} values, counting aliases")])
        if node.tag not in ("", "plain"):
            self.complain(path, node, f"the tag {node.tag!r} is not allowed in a recipe; remove it")
        if isinstance(node, ScalarNode):
            return Node(plain_value(node.value) if node.tag == "plain" else node.value, where)
        if len(path) > _DEEPEST:  # the text itself is less deep
            raise RecipeError([ConfigIssue(dotted(path[:1]), where, "an alias that contains itself")])
        if isinstance(node, MappingNode):
            return Node(self.mapping(node, path), where)
        items = enumerate(node.value)
        return Node([self.convert(item, (*path, str(i)), self.place(item.start_mark.line)) for i, item in items], where)

    def mapping(self, node: MappingNode, path: Path) -> dict[str, Node]:
        result: dict[str, Node] = {}
        for key, value in node.value:
            where = self.place(key.start_mark.line)
            if not isinstance(key, ScalarNode):
                self.complain(path, key, "a key must be a single word")
            elif key.value in result:
                line = result[key.value].where.removeprefix(f"{self.source}:")
                first = f" (first on line {line})" if self.numbered else ""
                self.complain((*path, key.value), key, f"the key is given twice{first}; remove one")
            else:
                result[key.value] = self.convert(value, (*path, key.value), where)
        return result


def _cure(error: MarkedYAMLError) -> str:
    issue, mark, context = error.problem or "can't be read", error.problem_mark, error.context_mark
    more = f", {error.context} on line {context.line + 1}" if mark and context and mark.line != context.line else ""
    return next((cure.format(issue) for part, cure in _CURES.items() if part in issue), issue + more)


class _Representer(SafeRepresenter):
    """A representer that quotes strings which YAML 1.1 or 1.2 could parse as another type."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        readable = all(line.isprintable() for line in data.split("\n")) and data == data.rstrip(" ")
        quoted = plain_value(data) != data or data.lower() in _BOOLEANS_OF_YAML_1_1
        style = "'" if quoted else '"' if not readable else "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def dump_yaml(value: Config | dict[str, object]) -> str:
    """Return the resolved recipe as YAML. Loading it gives an equal value; floats are exact (``1e-06``)."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer, yaml.width = _Representer, 2**30
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = StringIO()
    yaml.dump(value.model_dump(mode="json") if isinstance(value, Config) else value, text)
    return text.getvalue()
