"""Recipes, parents and overrides are merged into one value with the origin of every leaf."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config.settings import Clip, Fruit, Named, Pair, Settings
from whet.config import Config, RecipeError, dump_yaml, list_recipes, load
from whet.config.explain import annotated_yaml, explain
from whet.run.recipe import Recipe


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(text: str, *overrides: str, name: str = "r.yaml"):
    Path(name).write_text(text)
    return load(Settings, name, list(overrides), search=Path())


@pytest.mark.parametrize("number", ["1e-5", "1E-5", "1.0e-5", ".00001", "+1e-05", "0.00001"])
def test_every_way_to_write_a_number_is_a_number(number):
    assert loaded(f"optimizer: {{lr: {number}}}").value.optimizer.lr == 1e-5
    assert loaded("name: x", f"optimizer.lr={number}").value.optimizer.lr == 1e-5


def test_1e5_is_a_number_and_a_whole_number_is_a_float():
    assert loaded("optimizer: {lr: 1e5}").value.optimizer.lr == 100000.0
    whole = loaded("optimizer: {lr: 2}").value.optimizer.lr
    assert whole == 2.0
    assert isinstance(whole, float)


@pytest.mark.parametrize("word", ["no", "on", "off", "yes", "y", "12:30", "2024-01-01", "1_000", "0b1"])
def test_words_that_yaml_1_1_misreads_stay_text(word):
    assert loaded(f"name: {word}").value.name == word


def test_lists_texts_and_names_become_what_strict_fields_want():
    value = loaded("sizes: [3, 4]\nfolder: a/b\nfruit: pear\nloss: {type: clip, layers: [7]}").value
    assert (value.sizes, value.folder, value.fruit, value.loss) == ((3, 4), Path("a/b"), Fruit.PEAR, Clip(layers=(7,)))


def test_a_component_is_given_by_name_mapping_or_instance():
    assert loaded("loss: pair").value.loss == Pair()
    assert loaded("loss: {type: pair, margin: 3}").value.loss == Pair(margin=3.0)
    assert Settings(loss=Pair(margin=3.0)).loss == Pair(margin=3.0)
    assert loaded("roles: {actor: clip, critic: {type: pair}}").value.roles == {"actor": Clip(), "critic": Pair()}


def test_an_override_reaches_into_lists_and_components():
    assert loaded("losses: [clip, {type: pair}]", "losses.1.margin=7").value.losses == (Clip(), Pair(margin=7.0))
    assert loaded("loss: pair", "loss.margin=2").value.loss == Pair(margin=2.0)
    assert loaded("extra: pair", "extra=null").value.extra is None
    assert loaded("name: x", "sizes=[5, 6]").value.sizes == (5, 6)
    assert loaded("name: x", "name=a=b").value.name == "a=b"


def test_changing_one_key_keeps_the_rest_of_the_default():
    assert loaded("optimizer: {beta: 0.5}").value.optimizer.lr == 1e-3
    assert loaded("name: x", "losses.0.reduce=sum").value.losses == (Pair(margin=4.0, reduce="sum"),)
    assert loaded("loss: {high: 0.3}").value.loss == Clip(high=0.3)
    assert loaded("name: x", "loss.layers.0=9").value.loss == Clip(layers=(9, 2))


def test_an_empty_mapping_of_names_removes_them_and_an_empty_section_changes_nothing():
    text = (
        "columns: {completion: answer}\nroles: {judge: pair}\noptimizer: {beta: 0.5}\nloss: {type: pair, margin: 7}\n"
    )
    assert loaded(text).value.columns == {"prompt": "question", "completion": "answer"}
    emptied = loaded(text, "columns={}", "roles={}", "optimizer={}", "loss={}").value
    assert (emptied.columns, emptied.roles) == ({}, {})
    assert (emptied.optimizer.beta, emptied.loss) == (0.5, Pair(margin=7.0))
    assert loaded(text, "optimizer.beta=0.6", "optimizer={}").value.optimizer.beta == 0.6
    Path("base.yaml").write_text(text)
    assert loaded("extends: base\ncolumns: {}\n").value.columns == {}


def test_names_are_removed_and_others_given_on_one_command_line():
    text = "columns: {completion: answer}\nroles: {judge: pair}\nloss: {type: named, names: {a: 1}}\n"
    given = loaded(
        text, "columns={}", "columns.prompt=x", "roles={}", "roles.critic.margin=2", "roles.critic.type=pair"
    )
    assert given.value.columns == {"prompt": "x"}
    assert given.value.roles == {"critic": Pair(margin=2.0)}
    assert loaded(text, "columns.prompt=x", "columns={}").value.columns == {}
    assert loaded(text, "loss.names={}", "loss.names.b=2").value.loss == Named(names={"b": 2})
    assert loaded("name: x", "loss=named", "loss.names={}", "loss.names.b=2").value.loss == Named(names={"b": 2})


def test_another_type_drops_the_keys_of_the_old_one_whatever_the_order_of_overrides():
    text = "loss: {type: clip, high: 0.5}"
    for overrides in (["loss.type=pair", "loss.margin=2"], ["loss.margin=2", "loss.type=pair"]):
        assert loaded(text, *overrides).value.loss == Pair(margin=2.0)
    assert loaded(text, "loss=pair").value.loss == Pair()


def test_a_child_merges_over_its_parents():
    Path("base.yaml").write_text("steps: 5\noptimizer: {lr: 2e-6, beta: 0.8}\nloss: {type: clip, high: 0.5}\n")
    Path("middle.yaml").write_text("extends: base\noptimizer: {beta: 0.7}\nloss: {layers: [3]}\n")
    value = loaded("extends: ./middle.yaml\nsteps: 6\n").value
    assert value.steps == 6
    assert (value.optimizer.lr, value.optimizer.beta) == (2e-6, 0.7)
    assert value.loss == Clip(high=0.5, layers=(3,))
    assert loaded("extends: middle\nloss: {type: pair}\n").value.loss == Pair()


def test_the_parent_named_by_a_path_is_relative_to_the_child(in_empty_folder):
    Path("deep").mkdir()
    Path("deep/base.yaml").write_text("steps: 7\n")
    assert loaded("extends: ./base.yaml\n", name="deep/child.yaml").value.steps == 7


def test_each_leaf_says_where_it_came_from():
    Path("base.yaml").write_text("\nsteps: 5\noptimizer:\n  lr: 1\n")
    origins = loaded("extends: base\nloss: pair\nsizes:\n  - 3\n  - 4\n", "optimizer.beta=1").origins
    expected = {
        "steps": "base.yaml:2",
        "optimizer.lr": "base.yaml:4",
        "optimizer.beta": "override",
        "optimizer.warmup": "default",
        "loss.type": "r.yaml:2",
        "loss.margin": "default",
        "sizes.1": "r.yaml:5",
        "losses.0.margin": "default",
    }
    assert {key: origins[key] for key in expected} == expected


def test_a_run_folder_is_read_through_its_recipe():
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text("steps: 8\n")
    assert load(Settings, "run", search=Path()).value.steps == 8


def test_the_annotated_recipe_loads_to_the_same_value():
    first = loaded("name: |\n  two\n  lines\nloss: pair\nroles: {a: clip}\n", "optimizer.lr=1e-6")
    text = annotated_yaml(first)
    assert "lr: 1e-06" in text
    assert "# override" in text
    assert "# r.yaml:1" in text
    assert loaded(text, name="again.yaml").value == first.value


def test_explain_says_everything_about_one_key():
    text = explain(loaded("name: x", "optimizer.lr=1e-6"), "optimizer.lr")
    for part in ("a number", "greater than 0", "0.001", "1e-06", "override", "Learning rate."):
        assert part in text
    assert "Decay of the first moment." in explain(loaded("name: x"), "optimizer.beta")
    assert "Steps until the full rate." in explain(loaded("name: x"), "optimizer.warmup")
    assert "A clipped loss." in explain(loaded("name: x"), "loss")
    with pytest.raises(RecipeError, match=r"optimizer\.lrr: unknown key\. Did you mean 'lr'\?"):
        explain(loaded("name: x"), "optimizer.lrr")


def test_recipes_are_listed_with_their_description(in_empty_folder):
    Path("a.yaml").write_text("description: What a does.\nsteps: 3\n")
    Path("b.yaml").write_text("steps: 3\n")
    assert list_recipes(in_empty_folder) == {"a": "What a does.", "b": ""}


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    [
        "no",
        "1e-5",
        "0x1F",
        "",
        " ",
        "a\nb",
        "a\n",
        "\n",
        " a\n b",
        "# x",
        "a: b",
        "~",
        "null",
        "true",
        "\u2028",
        "\ufeff",
        "\t",
        "- a",
        "12:30",
    ]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LOSS = st.builds(Clip, high=FLOATS, layers=st.lists(st.integers(), max_size=3).map(tuple)) | st.builds(
    Pair, margin=FLOATS, reduce=st.sampled_from(["mean", "sum"])
)


@given(
    st.builds(
        Settings,
        name=st.none() | TEXTS,
        loss=LOSS,
        extra=st.none() | LOSS,
        losses=st.lists(LOSS, max_size=2).map(tuple),
        roles=st.dictionaries(TEXTS, LOSS, max_size=2),
        numbers=st.dictionaries(TEXTS, FLOATS, max_size=3),
        kl=FLOATS | st.just("auto"),
        shuffle=st.booleans(),
    )
)
@settings(max_examples=150, deadline=None)
def test_what_is_dumped_loads_to_an_equal_value(value):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_bytes(dump_yaml(value).encode())
        assert load(Settings, path).value == value


def test_small_floats_are_written_short():
    class Rates(Config):
        a: float = 1e-6
        b: float = 0.1

    assert dump_yaml(Rates()) == "a: 1e-06\nb: 0.1\n"


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "a\n\u2029"])
def test_line_breaks_of_unicode_survive_a_dump(text):
    assert loaded(dump_yaml(Settings(name=text))).value.name == text


def test_an_override_of_a_part_after_the_bare_value_names_the_wrong_key(tiny_model: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(Recipe, "quickstart", [f"model={tiny_model}", "model.pth=x"])
    assert [issue.key for issue in caught.value.issues] == ["model.pth"]
    overrides = ["model.lora.rank=4", f"model={tiny_model}"]
    model = load(Recipe, "quickstart", overrides).value.model
    assert model == load(Recipe, "quickstart", overrides[::-1]).value.model
    assert (model.path, model.lora and model.lora.rank) == (str(tiny_model), 4)
