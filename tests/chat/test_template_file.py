"""A chat template may be given as a file, whose text the run keeps."""

from pathlib import Path

import pytest

from tests.toy import toy_settings, write_settings
from whet.config import RecipeError, load
from whet.run.recipe import Recipe


def test_the_text_of_the_file_becomes_the_setting(tiny_model: Path, tmp_path: Path) -> None:
    text = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(text)
    recipe = write_settings(tmp_path / "toy.yaml", toy_settings(tiny_model))
    assert load(Recipe, recipe, [f"chat_template={tmp_path}/mine.jinja"]).value.chat_template == text
    assert load(Recipe, recipe, ["chat_template=plain"]).value.chat_template == "plain"
    assert load(Recipe, recipe, [f"chat_template='{text}.jinja'"]).value.chat_template == f"{text}.jinja"


def test_a_file_that_cant_be_read_is_named(tiny_model: Path, tmp_path: Path) -> None:
    recipe = write_settings(tmp_path / "toy.yaml", toy_settings(tiny_model))
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    for name, problem in (("none.jinja", "No such file or directory"), ("latin.jinja", "not UTF-8 text")):
        with pytest.raises(RecipeError, match=rf"chat_template: the chat template .*{name} can't be read: {problem}"):
            load(Recipe, recipe, [f"chat_template={tmp_path}/{name}"])
    with pytest.raises(RecipeError, match=r"The setting here is chat_template, the text or a file"):
        load(Recipe, recipe, ["model.chat_template=mine.jinja"])
