"""The rooms of the house: imports point down only, and heavy packages stay where they belong."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "whet"

# From the ground up. A module may import from its own floor and from those below it.
FLOORS = [
    {"base"},
    {"config", "fetch", "processes"},
    {"core", "metrics", "sandbox"},
    {"losses", "chat", "shells", "tools"},
    {"data"},
    {"tasks"},
    {"models"},
    {"lineage"},
    {"engines", "cluster", "parallel"},
    {"rollouts", "endpoint", "learner", "weights", "checkpoint"},
    {"distillation"},
    {"algorithms"},
    {"run", "prep", "launch"},
    {"diagnose", "show"},
    {"watch"},
    {"api", "pipeline"},
    {"cli", "recipes", "__main__", "__init__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Who may import what at all, as path prefixes below whet/.
ONLY_IN = {
    "ray": ("cluster/",),
    "vllm": ("engines/vllm/",),
    "torch.distributed": ("parallel/", "learner/", "weights/", "checkpoint/", "diagnose/layout", "fetch/megatron"),
}

DOTTED_PATH = re.compile(r"whet(\.\w+)+(:\w+)?")
# Files below whet/ that may name modules of higher floors (a regular expression of them), and why.
UPWARD_PATHS = {
    "config/moved.py": ".*",  # a table of renames: nothing is imported by it
    "tasks/judges/hosted.py": r"whet\.endpoint\.hosted_judge:HostedJudge",  # loaded by its process, for torch
    "tasks/preference/reward_model_process.py": r"whet\.models\.(reward_model|classifier)",  # for torch
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path, *, at_run_time: bool = True) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of every import, inside functions too, but not those for type checkers only."""

    def walk(node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and at_run_time:
                for other in child.orelse:
                    yield from walk(other)
            elif isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                yield child.lineno, child.module
                yield from ((child.lineno, f"{child.module}.{alias.name}") for alias in child.names)
            else:
                yield from walk(child)

    return tuple(walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_imports_point_down_only() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in modules()
        for line, name in imports(path)
        if name.startswith("whet.") and FLOOR.get(name.split(".")[1], 0) > FLOOR[room(path)]
    ]
    assert not upward, "\n".join(upward)


def dotted_paths(path: Path) -> Iterator[tuple[int, str]]:
    """(line, path) of every text that is nothing but the path of a module of whet, or of something in one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED_PATH.fullmatch(node.value):
            yield node.lineno, node.value


def test_dotted_paths_in_texts_point_down_only() -> None:
    """Registries and worker processes import by name from below. Classes of higher floors are found by entry points."""
    upward = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in modules()
        for line, name in dotted_paths(path)
        if FLOOR.get(name.split(":")[0].split(".")[1], 0) > FLOOR[room(path)]
        and not re.fullmatch(UPWARD_PATHS.get(path.relative_to(PACKAGE).as_posix(), ""), name)
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_imported_only_where_it_belongs(package: str) -> None:
    strangers = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in modules()
        for line, name in imports(path)
        if (name == package or name.startswith(package + "."))
        and not str(path.relative_to(PACKAGE)).startswith(ONLY_IN[package])
    ]
    assert not strangers


def test_tasks_import_no_torch() -> None:
    strangers = [
        f"{path.name}:{line}"
        for path in (PACKAGE / "tasks").rglob("*.py")
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "transformers")
    ]
    assert not strangers


def test_no_file_is_too_long_for_one_subject() -> None:
    long = [f"{path}: {n}" for path in modules() if (n := len(path.read_text(encoding="utf-8").splitlines())) > 400]
    assert not long


def test_nothing_depends_on_pythons_hash_which_differs_from_process_to_process() -> None:
    """Seeds and digests come from ``hashlib``."""
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "hash"
    ]
    assert not calls
