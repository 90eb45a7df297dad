"""Each mistake in a recipe is reported with its key, its line and the fix."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from tests.config.settings import Loss, Optimizer, Required, Settings
from whet.config import Config, RecipeError, SettingsError, load
from whet.config.component import ComponentError, import_path
from whet.config.issues import nearest

CASES = {
    "unknown key": ("stepz: 3", "r.yaml:1: stepz: unknown key. Did you mean 'steps'?"),
    "unknown key in a section": (
        "optimizer:\n  beat: 1",
        "r.yaml:2: optimizer.beat: unknown key. Did you mean 'beta'?",
    ),
    "unknown key in a component": (
        "loss:\n  type: pair\n  margn: 1",
        "r.yaml:3: loss.margn: unknown key. Did you mean 'margin'?",
    ),
    "unknown key in a list": (
        "losses:\n  - clip\n  - type: pair\n    hihg: 1",
        "r.yaml:4: losses.1.hihg: unknown key.",
    ),
    "key of a section": ("lr: 1", "r.yaml:1: lr: unknown key. Did you mean 'optimizer.lr'?"),
    "key of another case": ("optimizer: {LR: 1}", "Did you mean 'lr'?"),
    "text for an integer": ("steps: abc", "r.yaml:1: steps: expected a whole number, got text 'abc'"),
    "a number of a thousand digits": ("steps: 1" + "0" * 1000, "steps: expected a whole number, got text '1000"),
    "fraction for an integer": ("steps: 2.5", "expected a whole number, got the number 2.5"),
    "1e2 for an integer": ("steps: 1e2", "expected a whole number, got the number 100.0; write 100"),
    "boolean for an integer": ("steps: true", "expected a whole number, got true"),
    "boolean for a number": ("optimizer: {lr: true}", "optimizer.lr: expected a number, got true"),
    "null for a number": ("optimizer: {lr: }", "optimizer.lr: expected a number, got null (nothing)"),
    "quoted number": (
        'optimizer:\n  lr: "1e-5"',
        "r.yaml:2: optimizer.lr: expected a number, got text '1e-5' in quotes; remove the quotes",
    ),
    "number for a text": ("name: 12", "name: expected text or null, got the number 12; put it in quotes"),
    "yes": ("shuffle: yes", "shuffle: expected true or false, got text 'yes'; write true (only true and false"),
    "off": ("shuffle: off", "shuffle: expected true or false, got text 'off'; write false"),
    "no": ("shuffle: no", "got text 'no'; write false (only true and false are booleans)"),
    "quoted boolean": ('shuffle: "true"', "got text 'true'; remove the quotes"),
    "1 for a boolean": ("shuffle: 1", "expected true or false, got the number 1"),
    "negative": ("optimizer: {lr: -1}", "r.yaml:1: optimizer.lr: expected greater than 0, got the number -1"),
    "zero where one is least": ("steps: 0", "steps: expected at least 1, got the number 0"),
    "nan": ("optimizer: {beta: .nan}", "optimizer.beta: expected a finite number"),
    "inf": ("optimizer: {beta: -.inf}", "optimizer.beta: expected a finite number"),
    "too large": ("optimizer: {beta: 1e999}", "optimizer.beta: expected a finite number"),
    "list for a section": ("optimizer: [1]", "optimizer: expected a mapping (lr, beta, warmup), got a list of 1"),
    "section for a number": ("steps: {a: 1}", "steps: expected a whole number, got a mapping of 1"),
    "number for a list": ("losses: 3", "losses: expected a list"),
    "short list": ("sizes: [1]", "sizes.1: is missing"),
    "long list": ("sizes: [1, 2, 3]", "sizes: expected a list of 2: a whole number, a whole number, got a list of 3"),
    "wrong item": ("sizes: [1, x]", "r.yaml:1: sizes.1: expected a whole number, got text 'x'"),
    "wrong value of a mapping": ("numbers:\n  a: 1\n  b: x", "r.yaml:3: numbers.b: expected a number, got text 'x'"),
    "choice": ("loss: {type: pair, reduce: meen}", "expected 'mean' or 'sum', got text 'meen'. Did you mean 'mean'?"),
    "enum": ("fruit: aple", "fruit: expected 'apple' or 'pear', got text 'aple'. Did you mean 'apple'?"),
    "union": ("kl: atuo", "kl: expected a number or 'auto', got text 'atuo'. Did you mean 'auto'?"),
    "unknown type": ("loss: {type: cilp}", "r.yaml:1: loss.type: unknown type 'cilp'. Did you mean 'clip'?"),
    "swapped letters": ("loss: pari", "loss: unknown type 'pari'. Did you mean 'pair'?"),
    "unknown bare type": ("loss: pare", "loss: unknown type 'pare'. Did you mean 'pair'?"),
    "no type": ("extra: {high: 1}", "r.yaml:1: extra: 'type' is missing; known: clip, pair"),
    "number for a component": ("loss: 3", "loss: 'type' is missing; known: clip, pair"),
    "cross-field rule": ("steps: 2", "r.yaml:1: steps (2) is less than optimizer.warmup (3)"),
    "duplicate key": ("steps: 3\nname: a\nsteps: 4", "r.yaml:3: steps: the key is given twice (first on line 1)"),
    "duplicate key in a section": (
        "optimizer:\n  lr: 1\n  lr: 2",
        "r.yaml:3: optimizer.lr: the key is given twice (first on line 2)",
    ),
    "tab": ("optimizer:\n\tlr: 1", "r.yaml:2: not valid YAML: a tab"),
    "empty": ("", "r.yaml: the file is empty"),
    "only a comment": ("# nothing\n", "r.yaml: the file is empty"),
    "list": ("- a", "r.yaml: the file is a list"),
    "scalar": ("hello", "r.yaml: the file is a single value"),
    "open bracket": ("sizes: [1, 2\nname: x\n", "not valid YAML"),
    "two colons": ("name: a: b", "r.yaml:1: not valid YAML: a second ': '"),
    "reserved character": ("steps: 3\nname: @home", "r.yaml:2: not valid YAML: found character '@'"),
    "two documents": ("steps: 3\n---\nsteps: 4", "r.yaml:2: not valid YAML: a second document"),
    "python tag": ("name: !!python/object/apply:os.getcwd []", "not allowed"),
    "self-containing alias": ("numbers: &a {b: *a}", "an alias that contains itself"),
    "an alias of aliases": (
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)),
        "r.yaml: more than 100,000 values, counting aliases",
    ),
    "nested without end": ("numbers: " + "[" * 3000, "r.yaml:1: not valid YAML: nested more than 50 deep"),
    "half a character": (r'name: "\ud800"', "r.yaml: a text contains a lone surrogate such as \\ud800"),
    "control character": ("steps: 3\nname: a\x07b", "r.yaml:2: the character '\\x07' is not allowed"),
    "extends is nowhere": (
        "extends: nowhere",
        "r.yaml:1: extends: 'nowhere': there is no recipe or run folder",
    ),
    "extends is not text": ("extends: [a]", "r.yaml:1: extends: expected the name of a recipe"),
    "extends in a section": ("optimizer: {extends: a}", "'extends' is allowed only at the top level of a file"),
}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(text: str | bytes, *overrides: str, root=Settings) -> str:
    Path("r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load(root, "r.yaml", list(overrides), search=Path())
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES.keys())
def test_a_mistake_is_named_with_its_key_line_and_cure(text, expected):
    assert expected in complaint(text)


class Parts(Config):
    parts: dict[str, Loss] = Field(min_length=1, max_length=2)


@pytest.mark.parametrize(("parts", "size"), [("{}", 0), ("{a: {}, b: {}, c: {}}", 3)])
def test_the_wrong_size_of_a_mapping_is_named_with_its_bounds(parts: str, size: int) -> None:
    expected = f"a mapping of at least 1 and a mapping of at most 2, got a mapping of {size}"
    assert complaint(f"parts: {parts}", root=Parts) == f"r.yaml:1: parts: expected {expected}"


OVERRIDES = {
    "unknown key": ("optimzer.lr=1", "override 1 (optimzer.lr=1): optimzer: unknown key. Did you mean 'optimizer'?"),
    "unknown nested key": (
        "optimizer.rl=1",
        "override 1 (optimizer.rl=1): optimizer.rl: unknown key. Did you mean 'lr'?",
    ),
    "wrong type": ("steps=abc", "override 1 (steps=abc): steps: expected a whole number, got text 'abc'"),
    "no equals sign": ("steps", "override 1 (steps): expected key.path=value"),
    "no value": ("steps=", "the value is missing; write steps=null"),
    "empty part": ("optimizer..lr=1", "expected key.path=value"),
    "index past the end": ("losses.1.margin=2", "there is no item 1: the list has 1 item, counted from 0"),
    "key of the wrong component": ("loss.margin=2", "loss.margin: unknown key."),
    "bad YAML": ("name=[1", "override 1 (name=[1): name: not valid YAML"),
    "key under a number": ("steps.a=1", "steps: expected a whole number, got a mapping"),
    "null for a number": ("steps=null", "steps: expected a whole number, got null"),
}


@pytest.mark.parametrize(("override", "expected"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_a_mistake_in_an_override_is_named_with_the_override(override, expected):
    assert expected in complaint("name: x", override)


IN_PYTHON: dict[str, tuple[dict[str, object], str]] = {
    "unknown key": ({"stepz": 3}, "Settings: stepz: unknown key. Did you mean 'steps'? Known: description, name"),
    "unknown key in a component": ({"loss": {"type": "pair", "margn": 1}}, "loss.margn: unknown key. Did you mean"),
    "unknown type": ({"loss": "pare"}, "Settings: loss: unknown type 'pare'. Did you mean 'pair'?"),
    "another component": ({"loss": Optimizer()}, "loss: tests.config.settings:Optimizer is not a Loss"),
    "a function": ({"steps": len}, "steps: expected a whole number, got a builtin_function_or_method, <built-in"),
    "text": (
        {"optimizer": Optimizer, "steps": "3"},
        "Settings: steps: expected a whole number, got text '3' in quotes",
    ),
    "too small": ({"steps": 0}, "Settings: steps: expected at least 1, got the number 0"),
    "choice": ({"kl": "atuo"}, "Settings: kl: expected a number or 'auto', got text 'atuo'. Did you mean 'auto'?"),
    "list for a tuple": ({"sizes": [1, 2]}, "Settings: sizes: expected a tuple, got a list; write (1, 2)"),
    "text for a path": ({"folder": "a"}, "Settings: folder: expected a path, got text 'a'; write Path('a')"),
    "key that is not text": ({"numbers": {1: 0.5}}, "Settings: numbers.1: a key must be text in quotes"),
    "cross-field rule": ({"steps": 2}, "Settings: steps (2) is less than optimizer.warmup (3)"),
}


@pytest.mark.parametrize(("settings", "expected"), IN_PYTHON.values(), ids=IN_PYTHON.keys())
def test_a_mistake_in_settings_made_in_python_is_named_as_in_a_recipe(
    settings: dict[str, object], expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**settings)
    assert expected in str(caught.value)


def test_settings_are_not_changed() -> None:
    settings = Settings()
    with pytest.raises(SettingsError, match=r"steps: settings can't be changed; make new ones, as in Settings\(steps="):
        settings.steps = 3
    with pytest.raises(
        SettingsError, match=r"rows: is not a setting: .* compute other values in a functools\.cached_pr"
    ):
        settings.rows = 3  # type: ignore[attr-defined]


def test_settings_that_an_init_of_ones_own_takes_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"Own defines __init__\(path\), but its settings are fields, as in `path: str`"
    ):

        class Own(Settings):
            def __init__(self, path) -> None:
                self.rows = path

    class Passes(Settings):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)

    assert Passes(steps=3).steps == 3


def test_an_error_of_several_lines_in_a_module_is_one_mistake(in_empty_folder: Path) -> None:
    Path("untyped.py").write_text("from whet.config import Config\nclass Own(Config):\n    limit = 100\n")
    with pytest.raises(
        ComponentError, match=r"can't be imported: PydanticUserError: .*`limit = 100`.* at .*untyped\.py:2"
    ):
        import_path("untyped.py:Own")


TOGETHER = {
    "the override of the first setting": (("steps=2",), "override 1 (steps=2): steps (2) is less than"),
    "the override of another setting": (("optimizer.warmup=9",), "override 1 (optimizer.warmup=9): steps (5) is less"),
    "the last one of a setting": (("name=x", "steps=4", "steps=1"), "override 3 (steps=1): steps (1) is less than"),
    "no override": (("name=x",), "r.yaml:2: steps (2) is less than optimizer.warmup (3)"),
}


@pytest.mark.parametrize(("overrides", "expected"), TOGETHER.values(), ids=TOGETHER.keys())
def test_parts_that_do_not_fit_together_are_named_with_the_override(overrides, expected):
    steps = 2 if expected.startswith("r.yaml") else 5
    assert complaint(f"name: y\nsteps: {steps}", *overrides).startswith(expected)


def test_all_mistakes_are_shown_at_once():
    message = complaint("steps: x\nshufle: true\noptimizer: {lr: -1, lr: 2}", "loss.hihg=1", "fruit=plum")
    assert message.startswith("6 problems in the recipe:")
    for part in ("steps:", "shufle:", "optimizer.lr: the key", "optimizer.lr: expected", "loss.hihg:", "fruit:"):
        assert part in message


def test_a_missing_key_says_what_was_expected():
    assert complaint("steps2: 1", root=Required).count("steps: is missing; expected a whole number") == 1


def test_text_that_is_not_utf8_is_refused_with_its_line():
    assert "r.yaml:2: not UTF-8 text (byte 0xe9)" in complaint(b"steps: 3\nname: caf\xe9\n")


def test_a_file_that_is_too_large_for_a_recipe_is_refused(in_empty_folder):
    with (in_empty_folder / "r.yaml").open("wb") as file:
        file.truncate(99_000_000)
    rows = in_empty_folder / "rows.parquet"
    rows.write_bytes(bytes(2_000_000))
    with pytest.raises(RecipeError, match=r"rows\.parquet: is a data file, not YAML\. .* sft data\.path="):
        load(Settings, rows)
    with pytest.raises(RecipeError, match=r"r\.yaml: the file has more than 1 MB, so it is not a recipe"):
        load(Settings, "r.yaml")


def test_a_cycle_of_parents_is_refused(in_empty_folder):
    (in_empty_folder / "a.yaml").write_text("extends: ./r.yaml\n")
    assert "r.yaml -> a.yaml -> r.yaml" in complaint("extends: ./a.yaml\n")


def test_an_error_in_a_parent_names_the_parent(in_empty_folder):
    (in_empty_folder / "a.yaml").write_text("name: x\nsteps: x\n")
    assert "a.yaml:2: steps: expected a whole number" in complaint("extends: a\nname: y\n")


def test_an_unknown_recipe_names_the_nearest_or_says_what_lists_all(in_empty_folder):
    for name in ("quickstart", "distill"):
        (in_empty_folder / f"{name}.yaml").write_text("steps: 3\n")
    (in_empty_folder / "dpo.yaml").write_text("steps: 3\n")
    (in_empty_folder / "dapo-quickstart.yaml").write_text("steps: 3\n")
    with pytest.raises(RecipeError, match=r"run folder of this name. Did you mean 'dapo-quickstart'\?"):
        load(Settings, "dapo", search=in_empty_folder)
    with pytest.raises(RecipeError, match=r"run folder of this name. Did you mean 'quickstart'\?"):
        load(Settings, "quikstart", search=in_empty_folder)
    with pytest.raises(RecipeError, match=r"run folder of this name. List the recipes with: whet recipes."):
        load(Settings, "zzz", search=in_empty_folder)


def test_a_mistyped_run_folder_names_the_nearest_run(in_empty_folder):
    run = in_empty_folder / "runs" / "mine-20260131-120000"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("steps: 3\n")
    with pytest.raises(RecipeError, match=r"no such file or run folder. Did you mean 'mine-20260131-120000'\?"):
        load(Settings, "runs/mine-20260131-120001", search=in_empty_folder / "none")
    with pytest.raises(RecipeError, match=r"run folder of this name. Did you mean 'runs/mine-20260131-120000'\?"):
        load(Settings, "mine-20260131-120000", search=in_empty_folder / "none")


def test_a_missing_file_names_the_nearest_file(in_empty_folder):
    (in_empty_folder / "mine.yaml").write_text("steps: 3\n")
    with pytest.raises(RecipeError, match=r"mien.yaml: there is no such file\. Did you mean 'mine.yaml'\?"):
        load(Settings, "mien.yaml", search=in_empty_folder)


def test_a_folder_without_a_recipe_is_refused(in_empty_folder):
    (in_empty_folder / "runs").mkdir()
    with pytest.raises(RecipeError, match=r"is a folder without a recipe\.yaml"):
        load(Settings, "./runs", search=in_empty_folder)


def test_swapped_letters_are_nearer_than_another_letter():
    assert nearest("gpro", ["gspo", "grpo", "dapo"]) == "grpo"
    assert nearest("gspoo", ["gspo", "grpo"]) == "gspo"
