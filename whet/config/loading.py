"""Loading a recipe: a name or path and dotted overrides become one validated value with the origin of each setting.

Parents named by ``extends`` are read first, then the recipe, then the overrides; each layer is merged over the previous
one. All mistakes are collected and raised together. Independent of what the settings mean.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

import whet
from whet.base.files import expanded
from whet.config.base import Config
from whet.config.component import DATA_FILES
from whet.config.issues import ConfigIssue, RecipeError, did_you_mean
from whet.config.schema import UNTYPED, Place, find_place, merge
from whet.config.tree import DEFAULT, Node, dotted, from_plain
from whet.config.tree import Path as TreePath
from whet.config.validation import issues_of
from whet.config.yaml_text import parse_yaml

C = TypeVar("C", bound=Config)
C_co = TypeVar("C_co", bound=Config, covariant=True)

RECIPES = Path(whet.__file__).parent / "recipes"
"""The folder of the recipes that come with the package."""

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+(?<!\.yaml)(?<!\.yml)")  # of the Hugging Face Hub
_MOST_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C_co]):
    """A validated recipe."""

    value: C_co
    origins: dict[str, str]  # dotted key of every leaf of the dump -> "quickstart.yaml:12", "override" or "default"
    path: Path  # the file that was named
    tree: Node  # the merged settings, each with its origin


def load(
    root: type[C],
    source: str | Path,
    overrides: Sequence[str] = (),
    search: Path = RECIPES,
    *,
    profile: str | None = None,
    settings: Node | None = None,
) -> Loaded[C]:
    """Read, merge and validate a recipe.

    ``source`` is a YAML file, a run folder (its ``recipe.yaml``) or the name of a recipe in ``search``; ``overrides``
    are ``key.path=value`` with a value in YAML. ``profile`` names an entry of the file's ``profiles``, whose settings
    are merged over the others; ``settings`` is a part of another file that is merged next. Raises RecipeError with all
    mistakes.
    """
    issues: list[ConfigIssue] = []
    path = find_recipe(source, search)
    layers = _read_with_parents(path, search, issues, [])
    layers += [*_profiles(layers, profile), *([] if settings is None else [settings])]
    trees: list[Node] = []  # after each layer
    for layer in layers:
        trees.append(_merged(root, trees[-1] if trees else None, layer, issues))
    trees.append(_merged(root, trees[-1], _read_overrides(root, overrides, issues, trees[-1]), issues))
    tree = trees[-1]
    try:
        value = root.from_values(tree.plain())
        files = [_display_path(path, search), *([] if settings is None else [settings.where.rpartition(":")[0]])]
        if inherited := _unused_inherited(value, trees, files, issues):
            tree = tree.without(inherited)
            value = root.from_values(tree.plain())
    except ValidationError as error:
        raise RecipeError([*issues, *issues_of(error, root, tree)]) from None
    except PydanticSerializationError:
        issues.append(ConfigIssue("", str(path), "a text contains a lone surrogate such as \\ud800; remove it"))
    if issues:
        raise RecipeError(issues)
    merged = tree

    def written(key: str) -> bool:
        node, rest = merged.find(tuple(key.split(".")))
        return not rest and node.where != DEFAULT

    value, implied = value.with_implied(written)
    origins = _origins(value, tree)
    for key, reason in implied.items():
        origins |= {leaf: reason for leaf in origins if f"{leaf}.".startswith(f"{key}.")}
    return Loaded(value, origins, path, tree)


def load_overrides(root: type[C], overrides: Sequence[str]) -> C:
    """Return settings that are given by overrides alone. Raises RecipeError with all mistakes."""
    issues: list[ConfigIssue] = []
    tree = merge(Place(root), None, _read_overrides(root, overrides, issues), issues)
    try:
        value = root.from_values(tree.plain())
    except ValidationError as error:
        raise RecipeError([*issues, *issues_of(error, root, tree)]) from None
    if issues:
        raise RecipeError(issues)
    return value


def keys_of_overrides(root: type[Config], overrides: Sequence[str]) -> set[str]:
    """Return the dotted keys of all settings that the overrides give."""
    return set(map(dotted, _read_overrides(root, overrides, []).leaves()))


def _merged(root: type[Config], tree: Node | None, layer: Node, issues: list[ConfigIssue]) -> Node:
    replaced = root.replaced_by(layer.children())
    return merge(Place(root), tree and tree.without((key,) for key in replaced), layer, issues)


def _unused_inherited(
    value: Config, trees: Sequence[Node], files: list[str], issues: list[ConfigIssue]
) -> list[TreePath]:
    """Return unused settings that are dropped: ones from parents, because a recipe does not choose all settings of its
    parents, and ones that a later layer, such as the overrides, makes unused. Other unused settings, in ``files`` or
    overrides, are added to ``issues``. ``trees``: the settings after each layer."""
    inherited = []
    checked = ("override ", *(f"{file}:" for file in files))
    unused_in = cache(lambda number: _unused_in(type(value), trees[number]))
    for key, why in value.unused().items():
        path = tuple(key.split("."))
        where = trees[-1].find(path)[0].where
        written = next(number for number, tree in enumerate(trees) if tree.find(path)[0].where == where)
        if where.startswith(checked) and key in unused_in(written):
            issues.append(ConfigIssue(key, where, why))
        else:
            inherited.append(path)
    return inherited


def _unused_in(root: type[Config], tree: Node) -> Collection[str]:
    """Return the keys of unused settings, none if the settings are not valid."""
    try:
        return root.from_values(tree.plain()).unused()
    except ValidationError:
        return ()


def find_recipe(source: str | Path, search: Path = RECIPES) -> Path:
    """Return the file that ``source`` names. Raises RecipeError with the most similar recipe name."""
    path = expanded(source)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if _looks_like_path(source):
        if path.is_file():
            return path
        near = [file.name for file in path.parent.glob("*.y*ml") if file.is_file()] if path.parent.is_dir() else []
        near += runs_in(path.parent)
        if path.stem in recipe_names(search) and not path.is_dir() and str(path.parent) == ".":
            message = f"there is no such file; the built-in recipe is called {path.stem}, without .yaml"
            raise RecipeError([ConfigIssue("", str(source), message)])
        if MODEL_ID.fullmatch(str(source)) and not path.parent.is_dir():
            message = f"there is no such file or run folder. A model is a setting of a recipe: RECIPE model={source}"
            raise RecipeError([ConfigIssue("", str(source), message)])
        missing = "there is no such file" + " or run folder" * (path.suffix not in (".yaml", ".yml", *DATA_FILES))
        what = "is a folder without a recipe.yaml" if path.is_dir() else missing
        raise RecipeError([ConfigIssue("", str(source), f"{what}.{did_you_mean(path.name, near)}")])
    names = recipe_names(search)
    if str(source) in names:
        return search / f"{source}.yaml"
    if str(source).lower().endswith(DATA_FILES):
        raise RecipeError([ConfigIssue("", repr(str(source)), _of_rows(source))])
    of_that_kind = [name for name in sorted(names) if name.startswith(f"{str(source).lower()}-")]  # ppo-quickstart
    near = of_that_kind[:1] or [*names, *runs_in(Path()), *(f"runs/{name}" for name in runs_in(Path("runs")))]
    hint = did_you_mean(str(source), near) or " List the recipes with: whet recipes."
    message = f"there is no recipe or run folder of this name.{hint} The path of a recipe file ends in .yaml."
    raise RecipeError([ConfigIssue("", repr(str(source)), message)])


def runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a folder, sorted."""
    return sorted(file.parent.name for file in folder.glob("*/recipe.yaml") if file.is_file())


def recipe_names(search: Path = RECIPES) -> list[str]:
    """Return the names of the recipes in a folder, sorted."""
    return sorted(file.stem for file in search.glob("*.yaml"))


def list_recipes(search: Path = RECIPES) -> dict[str, str]:
    """Return the ``description`` of each recipe as one line ("" without one), without validating the recipes."""
    descriptions = {}
    for name in recipe_names(search):
        node = parse_yaml(_read_text(search / f"{name}.yaml", search), name, [])
        about = node.children().get("description") if node else None
        descriptions[name] = " ".join(str(about.value).split()) if about else ""
    return descriptions


def _looks_like_path(source: str | Path) -> bool:
    text = str(source)
    return isinstance(source, Path) or text.endswith((".yaml", ".yml")) or os.sep in text or text in (".", "..")


def _display_path(path: Path, search: Path) -> str:
    """Return a recipe's path for messages: the file name of a built-in recipe, otherwise a path relative to the current
    folder if it is below it."""
    full = path.resolve()
    if full.parent == search.resolve():
        return full.name
    return os.path.relpath(full) if full.is_relative_to(Path.cwd()) else str(full)


def _of_rows(path: str | Path) -> str:
    return f"is a data file, not YAML. Name it in a file of settings, or for a recipe as in: sft data.path={path}"


def _read_text(path: Path, search: Path) -> str:
    try:
        if path.suffix.lower() in DATA_FILES and path.suffix.lower() != ".json":  # JSON is YAML
            raise RecipeError([ConfigIssue("", _display_path(path, search), _of_rows(path))])
        if path.stat().st_size > _MOST_BYTES:
            raise RecipeError(
                [ConfigIssue("", _display_path(path, search), "the file has more than 1 MB, so it is not a recipe")]
            )
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"not UTF-8 text (byte 0x{error.object[error.start]:02x}); save the file as UTF-8"
        raise RecipeError([ConfigIssue("", f"{_display_path(path, search)}:{line}", message)]) from None
    except OSError as error:
        raise RecipeError([ConfigIssue("", _display_path(path, search), f"can't be read: {error.strerror}")]) from None


def _read_with_parents(path: Path, search: Path, issues: list[ConfigIssue], below: list[Path]) -> list[Node]:
    """Return the layers, from the outermost parent to the file itself."""
    shown = _display_path(path, search)
    node = parse_yaml(_read_text(path, search), shown, issues)
    if node is None or not isinstance(node.value, dict):
        kind = "is empty" if node is None else "is a list" if isinstance(node.value, list) else "is a single value"
        raise RecipeError([*issues, ConfigIssue("", shown, f"the file {kind}; a recipe is a mapping, 'key: value'")])
    parent = node.value.pop("extends", None)
    if parent is None:
        return [node]
    if not isinstance(parent.value, str) or not parent.value:
        message = "expected the name of a recipe or a relative path"
        raise RecipeError([*issues, ConfigIssue("extends", parent.where, message)])
    try:
        near = path.parent / parent.value
        target = find_recipe(near if _looks_like_path(parent.value) else parent.value, search)
    except RecipeError as error:
        wrong = [ConfigIssue("extends", parent.where, f"{p.where}: {p.message}") for p in error.issues]
        raise RecipeError([*issues, *wrong]) from None
    chain = [*below, path.resolve()]
    if target.resolve() in chain:
        names = " -> ".join(_display_path(file, search) for file in [*chain, target])
        raise RecipeError([*issues, ConfigIssue("extends", parent.where, f"the parents form a cycle: {names}")])
    return [*_read_with_parents(target, search, issues, chain), node]


def _profiles(layers: list[Node], name: str | None) -> list[Node]:
    """Return the settings of a profile, of the parents first. Raises RecipeError if no file has the profile."""
    if name is None:
        return []
    profiles = [node.children() for layer in layers if (node := layer.children().get("profiles")) is not None]
    if chosen := [each[name] for each in profiles if name in each]:
        return chosen
    names = sorted({key for each in profiles for key in each})
    message = f"no profile is called {name!r}.{did_you_mean(name, names)} Known: {', '.join(names) or 'none'}"
    raise RecipeError([ConfigIssue("profiles", layers[-1].where, message)])


def _read_overrides(
    root: type[Config], overrides: Sequence[str], issues: list[ConfigIssue], below: Node | None = None
) -> Node:
    """Return the overrides as one layer. ``below``: the settings that it changes."""
    layer = Node({}, "override")
    for number, text in enumerate(overrides, 1):
        where = f"override {number} ({text})"
        if not isinstance(text, str):  # from Python
            issues.append(ConfigIssue("", where, f"expected a text such as 'steps=2', got a {type(text).__name__}"))
            continue
        key, equals, written = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            issues.append(ConfigIssue("", where, "expected key.path=value, as in optimizer.lr=1e-6"))
            continue
        try:
            node = parse_yaml(written, where, issues, numbered=False)
        except RecipeError as error:
            issues += [ConfigIssue(key, where, issue.message) for issue in error.issues]
            continue
        if node is None:
            message = f"the value is missing; write {key}=null, or {key}='\"\"' for an empty text"
            issues.append(ConfigIssue(key, where, message))
            continue
        if (place := find_place(root, _merged(root, below, layer, []), tuple(path))) is not None:
            node = place.expand(node)  # so that the next override can change a part of it
            node = replace(node, emptied=place.has_free_keys and node.value == {})
        for part in reversed(path):
            node = Node({part: node}, where)
        layer = merge(UNTYPED, layer, node, issues)
    return layer


def _origins(value: Config, tree: Node) -> dict[str, str]:
    plain = from_plain(value.model_dump(mode="json"))
    origins = {}
    for path in plain.leaves():
        node, rest = tree.find(path)
        # A component given as a bare name is the origin of its type.
        written = not rest or (rest == ("type",) and node.value == plain.find(path)[0].value)
        where = "override" if node.where.startswith("override ") else node.where
        origins[dotted(path)] = where if written else DEFAULT
    return origins
