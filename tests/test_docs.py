"""README and docs/ are true: links, files, commands, settings, signatures, messages; and their code runs."""

import ast
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer
from ruamel.yaml import YAML

from tests.groups import group
from tests.test_layers import FLOORS
from whet.cli.main import app, main
from whet.config import load
from whet.config.explain import explain
from whet.config.issues import RecipeError
from whet.pipeline.config import PipelineConfig
from whet.prep.config import PrepConfig
from whet.run.recipe import Recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of the languages."""
    return [text for language, text in _FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def inline(page: Path) -> list[str]:
    """Return the texts in single backticks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


# Links and files


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        unfinished = file.name == "quickstart.png" and "@@" in page.read_text(encoding="utf-8")
        if (not file.exists() and not unfinished) or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@each_page
def test_files_of_the_repository_exist(page: Path) -> None:
    named = [
        word
        for code in [*inline(page), *(line for block in blocks(page, "bash", "console") for line in block.splitlines())]
        for word in code.split()
        if re.fullmatch(r"(whet|tests|examples|benchmarks|docs)/[\w./-]*", word) and "*" not in word
    ]
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_list_of_rooms_is_true() -> None:
    rooms = next(block for block in blocks(ROOT / "docs/architecture.md", "") if block.startswith("whet/\n"))
    named = re.findall(r"^  (\w+)(?:/|\.py) ", rooms, re.MULTILINE)
    there = {path.stem for path in (ROOT / "whet").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(named) == there - {"__init__", "__main__"}
    assert len(named) == len(set(named))


def test_the_floors_are_those_that_are_enforced() -> None:
    floors = next(block for block in blocks(ROOT / "docs/architecture.md", "") if "cli, recipes" in block)
    assert [set(line.split(", ")) for line in floors.splitlines()] == FLOORS


# Commands and settings


def split(line: str) -> list[str]:
    """The words of a command without its comment, which begins at the beginning of a word, as in a shell."""
    return shlex.split(re.sub(r"(^|\s)#.*", "", line))


def commands(page: Path) -> Iterator[list[str]]:
    """The words after ``whet`` of every command on the page."""
    lines = [line for block in blocks(page, "bash", "console") for line in block.splitlines()]
    for line in [*lines, *inline(page)]:
        words = split(line.removeprefix("$ ")) if line.startswith(("whet ", "$ whet ")) else []
        if words and all(word.isascii() for word in words):
            yield words[1:]


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    commands_there = typer.main.get_command(app).commands
    for words in commands(page):
        if words[0] in ("--help", "...") or words[0].startswith("--"):
            continue
        assert words[0] in commands_there, f"whet {words[0]}"
        if len(words) > 1 and words[1:] != ["..."]:
            commands_there[words[0]].make_context(words[0], list(words[1:]))  # raises for what is not known


@each_page
def test_overrides_are_accepted(page: Path) -> None:
    """Overrides in whole commands and overrides alone, as in `model.lora.rank=16`, are settings."""
    refused = "".join(blocks(page, "console")) + prose(page)
    for words in commands(page):
        recipe = words[1] if len(words) > 1 and words[0] in ("train", "show", "eval") else ""
        named = recipe in ("quickstart", "full-quickstart")
        if named or ((ROOT / recipe).suffix == ".yaml" and (ROOT / recipe).exists()):
            overrides = [word for word in words[2:] if re.match(r"[a-z_.0-9]+=", word)]
            if not any(f"({word})" in refused for word in overrides):
                load(Recipe, recipe if named else ROOT / recipe, _numbered(overrides))
    for code in inline(page):
        words = code.split()
        if all(re.fullmatch(r"[a-z_]+(\.\w+)*=\S+", word) for word in words):
            overrides = [word for word in words if re.split(r"[.=]", word)[0] in Recipe.model_fields]
            load(Recipe, "full-quickstart", _numbered(overrides))


def _numbered(overrides: list[str]) -> list[str]:
    return [re.sub(r"=N$", "=1", word) for word in overrides]


@each_page
def test_settings_that_are_named_exist(page: Path) -> None:
    quickstart, on_vllm = load(Recipe, "quickstart"), load(Recipe, "quickstart", ["generator=vllm"])
    for code in inline(page):
        first, dot, _ = code.partition(".")
        file = code.endswith((".yaml", ".py", ".json", ".jsonl", ".safetensors"))
        if dot and first in Recipe.model_fields and re.fullmatch(r"\w+(\.\w+)+", code) and not file:
            try:
                explain(quickstart, code)
            except RecipeError:  # a setting of the other generator
                explain(on_vllm, code)


@each_page
def test_output_is_what_the_command_prints(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("whet.run.run.start", lambda *_: pytest.fail("the page shows an error here"))
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            if not shown.strip():
                continue
            with pytest.raises(SystemExit):
                main(shlex.split(command, comments=True)[1:])
            printed = capsys.readouterr()
            assert (printed.out + printed.err).strip() == shown.strip()


@each_page
def test_recipes_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [text for text in blocks(ROOT / "docs/configuration.md", "python") if "class MyTasks" in text]
    (tmp_path / "my_tasks.py").write_text(own[0])
    for folder in (tmp_path, ROOT, ROOT / "examples"):
        monkeypatch.syspath_prepend(str(folder))
    snippets = blocks(page, "yaml")
    indented = re.findall(r"^    loss:\n(?:^ {6,}.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    snippets += [f"algorithm:\n  type: grpo\n{textwrap.indent(textwrap.dedent(text), '  ')}" for text in indented]
    for number, text in enumerate(snippets):
        file = tmp_path / f"{number}.yaml"
        if text.startswith(("model:", "sources:")) and "\nsources:" in f"\n{text}":
            file.write_text(text)
            load(PrepConfig, file)
            continue
        if "\nstages:\n" in text:
            file.write_text(text)
            load(PipelineConfig, file)
            load(PipelineConfig, file, profile="tiny")
            continue
        file.write_text(text if "extends" in YAML(typ="safe").load(text) else f"extends: quickstart\n{text}")
        load(Recipe, file)


def test_the_recipes_for_rows_are_complete_files(tmp_path: Path) -> None:
    texts = blocks(ROOT / "docs/algorithms/rows.md", "yaml")
    assert len(texts) == 6
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
        assert load(Recipe, tmp_path / f"{number}.yaml").value.rows.batch_size > 0


# Code


@each_page
def test_python_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that only define something are run; the imports of all others exist."""
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    for text in blocks(page, "python"):
        tree = compile(text, "documented", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        defines = all(isinstance(node, _DEFINITIONS) or _constant(node) for node in tree.body)
        kept = tree.body if defines else imports
        exec(compile(ast.Module(kept, []), "documented", "exec"), module.__dict__)


def test_the_page_on_python_runs(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block, as a script, on a tiny model."""
    from tests.toy import toy_recipe, write_recipe

    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=1))
    small = "steps=1, group_size=2, prompts_per_step=2, max_new_tokens=4, evaluation={'limit': 2}"
    for code in blocks(ROOT / "docs/python.md", "python"):
        code = code.replace('"smollm2-135m-instruct"', f"{str(tiny_model)!r}, {small}").replace("steps=5", "steps=1")
        code = (
            code.replace('"quickstart"', repr(str(recipe))).replace("steps=10", "steps=2").replace("(1, 4)", "(1, 2)")
        )
        monkeypatch.chdir(tmp_path)
        exec(compile(code, "documented", "exec"), {"__name__": "__main__"})
    assert len(list((tmp_path / "runs").iterdir())) == 3


_DEFINITIONS = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.Tuple)


def test_the_readme_is_short_and_its_environment_fits_on_a_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130
    assert all(len(text.splitlines()) <= 24 for text in blocks(ROOT / "README.md", "python"))


def test_the_recipe_of_the_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(load(Recipe, ROOT / "examples/letters.yaml").value.data.tasks("test")) == 10


def test_the_filter_of_the_rollouts_page_filters() -> None:
    names: dict = {"__name__": "documented"}
    exec(next(text for text in blocks(ROOT / "docs/rollouts.md", "python") if "NotTooEasy" in text), names)
    assert names["NotTooEasy"]()(group("g", [1], [[2], [3]], [1.0, 1.0])) is None
    assert names["NotTooEasy"]()(group("g", [1], [[2], [3]], [1.0, 0.0])) is not None


# Metrics


def test_every_metric_of_a_run_is_explained(tiny_model: Path, tmp_path: Path) -> None:
    from tests.toy import toy_recipe
    from whet.metrics.sinks.jsonl import read_metrics
    from whet.run import run

    evaluation = {"limit": 2, "samples": 2, "temperature": 1.0}
    folder = run.start(toy_recipe(tiny_model, steps=1, evaluation=evaluation), tmp_path / "run")
    names = {name for line in read_metrics(folder / "metrics.jsonl") for name in line}
    names = {re.sub(r"^(loss|scores|run|time/overlap)/.*", r"\1/", name) for name in names} - {"step", "kind"}
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert not sorted(name for name in names if f"`{name}" not in page)


# Messages


@cache
def texts() -> list[str]:
    """The fixed parts of all texts in the package but docstrings; a line end joins the parts of one f-string."""
    found = []
    for file in (ROOT / "whet").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("\n".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                found.append(node.value)
    return found


def messages() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^`(.+)`$", page, re.MULTILINE)
    weights = (ROOT / "docs/weights.md").read_text(encoding="utf-8")
    quoted += [text.replace("\n> ", " ")[2:] for text in re.findall(r"^> .*(?:\n> .*)*", weights, re.MULTILINE)]
    return quoted


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_that_the_program_prints(message: str) -> None:
    """Every run of words between what varies (names in quotes, numbers, paths) is the fixed text of some message."""
    fixed = re.split(r"'[^']*'|\S*[0-9/=]\S+|[0-9]|\.\.\.|[.?:;] ", message)
    words = [part.strip() for part in fixed if len(part.strip()) >= 8 and not re.fullmatch(r"[\w.]+", part.strip())]
    assert words
    assert not [part for part in words if not any(part in text for text in texts())]
