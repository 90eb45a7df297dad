"""A recipe by name or path, plus dotted overrides, becomes one checked value that knows where each setting came from.

Parents named by ``extends`` are read first, then the recipe, then the overrides; each layer is merged over the last.
Everything wrong is collected and raised together. It knows nothing about what the settings mean.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

import whet
from whet.config.base import Config
from whet.config.nearest import did_you_mean
from whet.config.problems import Problem, RecipeError
from whet.config.schema import Place, complete, to_values
from whet.config.tree import Node, Origin, dotted, leaves, merge, nearest_node
from whet.config.validation import problems_of
from whet.config.yaml_text import parse_yaml

C = TypeVar("C", bound=Config)
C_co = TypeVar("C_co", bound=Config, covariant=True)

RECIPES = Path(whet.__file__).parent / "recipes"
"""The folder of the recipes that come with the package."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C_co]):
    """A checked recipe."""

    value: C_co
    origins: dict[str, str]  # dotted key of every leaf of the dump -> "quickstart.yaml:12", "override" or "default"
    path: Path  # the file that was named


def load(root: type[C], source: str | Path, overrides: Sequence[str] = (), search: Path = RECIPES) -> Loaded[C]:
    """Read, merge and check a recipe.

    ``source`` is a YAML file, a run folder (its ``recipe.yaml``) or the name of a recipe in ``search``; ``overrides``
    are ``key.path=value`` with a value in YAML. Raises RecipeError with everything that is wrong.
    """
    problems: list[Problem] = []
    path = find_recipe(source, search)

    def refuse(node: Node, message: str) -> None:
        problems.append(Problem("", node.origin.where, message))

    tree: Node | None = None
    for layer in [*_read_with_parents(path, search, problems, []), _read_overrides(overrides, problems)]:
        tree = complete(Place(root), merge(tree, layer, refuse), refuse)
    assert tree is not None
    value = None
    try:
        value = root.model_validate(to_values(Place(root), tree))
    except ValidationError as error:
        problems += problems_of(error, root, tree)
    if problems or value is None:
        raise RecipeError(problems)
    return Loaded(value, _origins(value, tree), path)


def find_recipe(source: str | Path, search: Path = RECIPES) -> Path:
    """The file that ``source`` names. Raises RecipeError naming the nearest recipe."""
    path = Path(source).expanduser()
    if path.is_dir() and (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if _looks_like_path(source):
        if path.is_file():
            return path
        near = [file.name for file in path.parent.glob("*.y*ml") if file.is_file()] if path.parent.is_dir() else []
        what = "is a folder without a recipe.yaml" if path.is_dir() else "there is no such file"
        raise RecipeError([Problem("", str(source), f"{what}.{did_you_mean(path.name, near)}")])
    names = recipe_names(search)
    if str(source) in names:
        return search / f"{source}.yaml"
    known = f" Recipes: {', '.join(names)}." if names else ""
    message = f"there is no recipe of this name.{did_you_mean(str(source), names)}{known} A file is named with .yaml."
    raise RecipeError([Problem("", repr(str(source)), message)])


def recipe_names(search: Path = RECIPES) -> list[str]:
    """The names of the recipes in a folder, sorted."""
    return sorted(file.stem for file in search.glob("*.yaml"))


def list_recipes(search: Path = RECIPES) -> dict[str, str]:
    """Each recipe's name and its one-line ``description`` (empty when it has none), without checking the recipes."""
    found = {}
    for name in recipe_names(search):
        file = search / f"{name}.yaml"
        node = parse_yaml(_read_text(file, search), Origin(file.name), [])
        about = node.value.get("description") if node is not None and isinstance(node.value, dict) else None
        found[name] = " ".join(str(about.value).split()) if about is not None else ""
    return found


def _looks_like_path(source: str | Path) -> bool:
    text = str(source)
    return isinstance(source, Path) or text.endswith((".yaml", ".yml")) or os.sep in text or text in (".", "..")


def _shown(path: Path, search: Path) -> str:
    """A recipe of the package by its file name, others relative to the current folder if they are under it."""
    full = path.resolve()
    if full.parent == search.resolve():
        return full.name
    return os.path.relpath(full) if full.is_relative_to(Path.cwd()) else str(full)


def _read_text(path: Path, search: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"not UTF-8 text (byte 0x{error.object[error.start]:02x}); save the file as UTF-8"
        raise RecipeError([Problem("", f"{_shown(path, search)}:{line}", message)]) from None
    except OSError as error:
        raise RecipeError([Problem("", _shown(path, search), f"can't be read: {error.strerror}")]) from None


def _read_with_parents(path: Path, search: Path, problems: list[Problem], below: list[Path]) -> list[Node]:
    """The layers from the oldest parent to the file itself."""
    shown = _shown(path, search)
    node = parse_yaml(_read_text(path, search), Origin(shown), problems)
    if node is None:
        raise RecipeError([*problems, Problem("", shown, "the file is empty; a recipe is lines of 'key: value'")])
    if not isinstance(node.value, dict):
        kind = "a list" if isinstance(node.value, list) else "a single value"
        message = f"the file holds {kind}; a recipe is lines of 'key: value'"
        raise RecipeError([*problems, Problem("", shown, message)])
    own = Node({key: item for key, item in node.value.items() if key != "extends"}, node.origin)
    parent = node.value.get("extends")
    if parent is None:
        return [own]
    if not isinstance(parent.value, str) or not parent.value:
        message = "expected the name of a recipe or a relative path"
        raise RecipeError([*problems, Problem("extends", parent.origin.where, message)])
    try:
        near = path.parent / parent.value
        target = find_recipe(near if _looks_like_path(parent.value) else parent.value, search)
    except RecipeError as error:
        wrong = [Problem("extends", parent.origin.where, f"{p.where}: {p.message}") for p in error.problems]
        raise RecipeError([*problems, *wrong]) from None
    chain = [*below, path.resolve()]
    if target.resolve() in chain:
        names = " -> ".join(_shown(file, search) for file in [*chain, target])
        raise RecipeError([*problems, Problem("extends", parent.origin.where, f"goes round in a circle: {names}")])
    return [*_read_with_parents(target, search, problems, chain), own]


def _read_overrides(overrides: Sequence[str], problems: list[Problem]) -> Node:
    layer = Node({}, Origin("override"))

    def refuse(node: Node, message: str) -> None:
        problems.append(Problem("", node.origin.where, message))

    for number, text in enumerate(overrides, 1):
        origin = Origin("override", override=f"override {number} ({text})")
        key, equals, written = text.partition("=")
        keys = key.strip().split(".")
        if not equals or not all(keys):
            problems.append(Problem("", origin.where, "expected key.path=value, as in optimizer.lr=1e-6"))
            continue
        try:
            node = parse_yaml(written, origin, problems)
        except RecipeError as error:
            problems += [Problem(key, p.where, p.message) for p in error.problems]
            continue
        if node is None:
            message = f"there is no value; write {key}=null, or {key}='\"\"' for an empty text"
            problems.append(Problem(key, origin.where, message))
            continue
        for part in reversed(keys):
            node = Node({part: node}, origin)
        layer = merge(layer, node, refuse)
    return layer


def _origins(value: Config, tree: Node) -> dict[str, str]:
    plain: dict[str, Any] = value.model_dump(mode="json")
    origins = {}
    for path in leaves(plain):
        node, rest = nearest_node(tree, path)
        # A component given as a bare name stands where its type does.
        written = not rest or (rest == ("type",) and node.value == _at(plain, path))
        origins[dotted(path)] = str(node.origin) if written else "default"
    return origins


def _at(plain: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        plain = plain[key]
    return plain
