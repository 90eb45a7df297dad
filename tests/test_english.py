"""Docstrings, comments, messages and documentation are written in plain words and the field's terms."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


# (regular expression, ignoring case; what to write instead)
PHRASES = (
    (r"\bwhat is (known|told|left)\b", "name the noun: 'the facts', 'the remaining tokens'"),
    (r"\bthose (that|of|which|who|whose)\b", "repeat the noun: 'tokens that ...', 'the settings of ...'"),
    (r"\bwhoever\b", "name the person or part: 'the caller', 'users who ...'"),
    (r"\bwhatever (it|they|he)\b", "'regardless of ...'"),
    (r"\banew\b", "'again', 'from scratch'"),
    (r"\bof (its|their|his|her|your|my) own\b", "'a separate ...', 'its own ...', or nothing"),
    (r"\blet(s|ting)? go of\b", "'release', 'free'"),
    (r"\b(goes|going|went) on\b", "'continues', 'resumes'"),
    (r"\bgo on with\b", "'continue', 'resume'"),
    (r"\bso many\b", "give the number: 'that number of', 'N'"),
    (r"\bunder way\b", "'in progress', 'in flight'"),
    (r"\bnobody\b", "name the subject: 'no process', 'no part of the run'; or use the passive"),
    (r"\bbeside\b", "'next to', 'in addition to', 'in parallel'"),
    (r"(?<!there )\b(is|are) no (?!longer\b|more\b|fewer\b|less\b|greater\b|larger\b)[a-z]", "'is not a ...'"),
    (r"\btold\b", "'given', 'reported', 'distinguished'"),
    (r"\bas (it|they) (lies?|stands?)\b", "'unchanged'"),
    (r"\bso far as\b", "'if', 'where'"),
    (r"(?<!refit/)\bunread\b", "'unused', 'hidden', 'unverified'"),
    (r"\b(anyone|everyone|somebody|anybody|everybody)\b", "name the person or part: 'another user', 'all ranks'"),
    (r"\bfor ever\b", "'permanently', 'irreversibly'"),
    (r"\bthere (twice|already|once)\b", "'duplicate', 'already present'"),
)

ANY_PHRASE = re.compile("|".join(pattern for pattern, _ in PHRASES), re.IGNORECASE)

# What a docstring must not begin with; what to write instead.
OPENINGS = (
    (r"(What|How|Who|Where|Whose|Which)\b(?!.*\?)", "'Return ...', 'Yield ...', or the name of the thing"),
    (r"Whether\b", "'Return whether ...'"),
    (r"(That|Those|Its?|Their) ", "name the thing"),
)

# Names of variables, arguments and functions that say nothing; a noun says what the value is.
NAMES = {"found", "one", "own", "known", "said", "held", "wanted", "told", "several", "everybody", "unread"}


def files() -> list[Path]:
    """Return the Python files and pages that follow the rules."""
    code = [path for room in ("whet", "tests", "benchmarks", "examples") for path in ROOT.glob(f"{room}/**/*.py")]
    paths = [*code, ROOT / "docs/site.py", *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    return sorted({*paths} - {Path(__file__)})  # this file quotes the phrases


def folder_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment. Tokens cost more than all else here: most files have no such words."""
    if ANY_PHRASE.search(source):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def texts(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every line of every text."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for number, line in enumerate(node.value.splitlines()):
                yield min(node.lineno + number, node.end_lineno or node.lineno), line


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        body = getattr(node, "body", [])
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every variable, argument and function that a file defines."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def problems(path: Path) -> list[str]:
    """Return what is to be written in other words, with the line of each."""
    where, source = path.relative_to(ROOT), path.read_text("utf-8")
    nodes = list(ast.walk(ast.parse(source))) if path.suffix == ".py" else []
    prose = [*comments(source), *texts(nodes)] if nodes else enumerate(source.splitlines(), 1)
    found = [
        f"{where}:{number}: {match.group()!r}; better: {instead}"
        for number, text in prose
        if ANY_PHRASE.search(text)
        for pattern, instead in PHRASES
        if (match := re.search(pattern, text, re.IGNORECASE))
    ]
    found += [
        f"{where}:{number}: a docstring begins with {match.group()!r}; better: {instead}"
        for number, text in docstrings(nodes)
        for pattern, instead in OPENINGS
        if (match := re.match(pattern, text))
    ]
    if where.parts[0] != "tests":
        found += [f"{where}:{n}: the name {name!r}: use a noun" for n, name in names(nodes) if name in NAMES]
    return found


FOLDERS = [(folder, list(paths)) for folder, paths in groupby(sorted(files(), key=folder_of), folder_of)]


@pytest.mark.parametrize("paths", [paths for _, paths in FOLDERS], ids=[folder for folder, _ in FOLDERS])
def test_the_files_of_a_folder_are_written_in_plain_english(paths: list[Path]) -> None:
    found = [problem for path in paths for problem in problems(path)]
    assert not found, "\n".join(found)
