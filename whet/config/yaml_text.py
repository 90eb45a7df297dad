"""YAML text to trees with line numbers and back, by the rules of YAML 1.2.

YAML 1.2 differs from PyYAML's 1.1 where it hurts: ``1e-5`` is a number, ``no`` and ``on`` are texts, ``012`` is twelve
and ``12:30`` is no number of minutes. It knows nothing about recipes.
"""

import re
from typing import Any

import yaml

from whet.config.base import Config
from whet.config.problems import Problem, RecipeError
from whet.config.tree import Node, Origin, Path, dotted

_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
_TAGS = {_NULL, _BOOL, _INT, _FLOAT, _STR, "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_SCALARS = (
    (_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), [*"~nN", ""]),
    (_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]),
    (_INT, re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), [*"-+0123456789"]),
    (
        _FLOAT,
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        [*"-+.0123456789"],
    ),
)


class _Resolver(yaml.resolver.BaseResolver):
    """The scalars of YAML 1.2."""


for _tag, _pattern, _first in _SCALARS:
    _Resolver.add_implicit_resolver(_tag, _pattern, _first)


class _Reader(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer, _Resolver):
    """PyYAML up to the node graph."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        _Resolver.__init__(self)


class _Writer(yaml.SafeDumper):
    """Writes what both YAML 1.2 and 1.1 readers understand the same way: a text such as ``no`` is quoted."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            *_Resolver.yaml_implicit_resolvers.get(first, []),
            *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        ]
        for first in {*_Resolver.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _write_float(writer: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    return writer.represent_scalar(_FLOAT, special.get(repr(value), repr(value)))


def _write_text(writer: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    if any(separator in value for separator in "\x85\u2028\u2029"):  # line breaks to YAML 1.1, which a reader may fold
        return writer.represent_scalar(_STR, value, style='"')
    return writer.represent_scalar(_STR, value, style="|" if "\n" in value else None)


_Writer.add_representer(float, _write_float)
_Writer.add_representer(str, _write_text)


def dump_yaml(value: Config | dict[str, Any]) -> str:
    """The resolved recipe. Loading it gives an equal value; floats keep every bit (``1e-06``)."""
    plain = value.model_dump(mode="json") if isinstance(value, Config) else value
    text: str = yaml.dump(plain, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=2**30)
    return text


def parse_number(text: str) -> float | None:
    """The number that ``text`` is when written without quotes."""
    for tag, pattern, _ in _SCALARS:
        if tag in (_INT, _FLOAT) and pattern.match(text):
            return _scalar(tag, text)
    return None


def parse_yaml(text: str, origin: Origin, problems: list[Problem]) -> Node | None:
    """The tree of a YAML text, or None when it is empty. Lines are counted when ``origin`` has none of its own.

    Duplicate keys, tags and odd keys go to ``problems``. Raises RecipeError when the text can't be parsed.
    """
    try:
        reader = _Reader(text)
        root = reader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        where = _at(origin, line).where
        raise RecipeError([Problem("", where, f"the character {chr(error.character)!r} is not allowed")]) from None
    except yaml.MarkedYAMLError as error:
        raise RecipeError([_syntax_problem(error, text, origin)]) from None
    except RecursionError:
        raise RecipeError([Problem("", origin.where, "nested too deeply")]) from None
    return None if root is None else _Converter(origin, problems).convert(root, (), origin)


class _Converter:
    def __init__(self, origin: Origin, problems: list[Problem]) -> None:
        self.origin, self.problems, self.above = origin, problems, set[int]()

    def convert(self, node: Any, path: Path, origin: Origin) -> Node:
        if id(node) in self.above:
            self.complain(path, node, "an alias that contains itself")
            return Node(None, origin)
        self.above.add(id(node))
        try:
            if node.tag not in _TAGS:
                self.complain(path, node, f"the tag {node.tag!r} is not allowed in a recipe; remove it")
            if isinstance(node, yaml.MappingNode):
                return Node(self.mapping(node, path), origin)
            if isinstance(node, yaml.SequenceNode):
                items = enumerate(node.value)
                return Node([self.convert(item, (*path, i), self.at(item)) for i, item in items], origin)
            try:
                return Node(_scalar(node.tag, node.value), origin, quoted=bool(node.style))
            except ValueError:
                self.complain(path, node, f"{node.value[:40]!r} doesn't fit its tag {node.tag!r}")
                return Node(None, origin)
        finally:
            self.above.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Node]:
        result: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.complain(path, key_node, "a key must be a plain word")
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in result:
                first = "" if self.origin.override else f" (first on line {lines[key]})"
                self.complain((*path, key), key_node, f"the key is given twice{first}; remove one")
                continue
            lines[key] = line
            result[key] = self.convert(value_node, (*path, key), self.at(key_node))
        return result

    def at(self, node: yaml.Node) -> Origin:
        return _at(self.origin, node.start_mark.line + 1)

    def complain(self, path: Path, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(dotted(path), self.at(node).where, message))


def _at(origin: Origin, line: int) -> Origin:
    return origin if origin.override else Origin(origin.source, line)


def _scalar(tag: str, text: str) -> Any:
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    if tag == _INT:
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if tag == _FLOAT:
        return float(text.replace(".inf", "inf").replace(".nan", "nan") if text[-1].isalpha() else text)
    return text


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, origin: Origin) -> Problem:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else None
    lines = text.splitlines()
    written = lines[line - 1] if line and line <= len(lines) else ""
    message = error.problem or "can't be read"
    if "'\\t'" in message or written.startswith("\t"):
        message = "a tab; YAML allows only spaces for indentation"
    elif "mapping values are not allowed" in message:
        message = "a second ': ' on the line, or wrong indentation; put a text that contains ': ' in quotes"
    elif "cannot start any token" in message:
        message += "; put a text that starts with it in quotes"
    elif "but found another document" in message:
        message = "a second document ('---'); a recipe is one document"
    elif error.context and error.context_mark and error.context_mark.line + 1 != line:
        message += f", {error.context} on line {error.context_mark.line + 1}"
    where = _at(origin, line).where if line else origin.where
    return Problem("", where, f"not valid YAML: {message}")
