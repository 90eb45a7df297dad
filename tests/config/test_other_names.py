"""Messages for settings written as in other libraries, and for files given as recipes. With the real recipe."""

import re
from pathlib import Path

import pytest

from tests.test_docs import ROOT
from whet.config import RecipeError, load
from whet.config.schema import find_place
from whet.config.tree import from_plain
from whet.run.other_names import OTHER_NAMES
from whet.run.recipe import Recipe


def said(*overrides: str, recipe: str = "quickstart") -> str:
    with pytest.raises(RecipeError) as caught:
        load(Recipe, recipe, overrides)
    return str(caught.value)


def test_every_answer_names_settings_that_there_are() -> None:
    tree = from_plain(load(Recipe, "quickstart").value.model_dump(mode="json"))
    for answer in set(OTHER_NAMES.values()) - {"whet train --folder", "whet resume RUN"}:
        key = tuple(re.match(r"[a-z_.]+", answer)[0].split("."))  # type: ignore[index]
        assert find_place(Recipe, tree, key) is not None, answer


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("learning_rate=1e-5", "optimizer.lr"),
        ("optimizer.learning_rate=1e-5", "optimizer.lr"),
        ("num_generations=8", "algorithm.group_size"),
        ("temperature=0.7", "sampling.temperature"),
        ("max_completion_length=9", "sampling.max_new_tokens"),
        ("per_device_train_batch_size=4", "rollouts.prompts_per_step"),
        ("gradient_accumulation_steps=4", "learner.max_tokens"),
        ("report_to=wandb", "sinks, as in sinks=[console,jsonl,wandb]"),
        ("lora_r=16", "model.lora.rank"),
        ("beta=0.1", "algorithm.loss.kl.coefficient"),
        ("algorithm.kl_coef=0.1", "algorithm.loss.kl.coefficient"),
        ("model.name=x", "model.path"),
        ("policy.generation.temperature=1", "sampling.temperature"),
        ("actor_rollout_ref.rollout.n=4", "algorithm.group_size"),
        ("num-train-epochs=3", "epochs"),
        ("folder=runs/x", "whet train --folder"),
    ],
)
def test_a_setting_of_another_library_is_answered_with_ours(override: str, answer: str) -> None:
    assert f"unknown key. The setting here is {answer}" in said(override)


def test_every_setting_in_the_table_of_the_page_is_answered() -> None:
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.count(" | ") == 4]
    keys = [key for line in table for key in re.findall(r"`([^`]+)`", line.split(" | ", 1)[1])]
    assert len(keys) > 70
    for key in {re.split("=", key)[0] for key in keys} - {"model", "data"}:  # two are called so here as well
        assert "unknown key. The setting here is " in said(f"{key}=1"), key


def test_a_mistyped_key_is_still_one() -> None:
    assert "Did you mean 'betas'?" in said("optimizer.beta=1")
    assert "Did you mean 'steps'?" in said("stepz=1")


def test_a_file_is_answered_with_how_it_is_given() -> None:
    assert "is a file, not a type; name a type that reads files, as in {type: " in said("data=my.jsonl")
    assert "data = arithmetic does not have it; it is a setting of data = " in said("data.path=x.csv")
    assert "for a recipe as in: sft data.path=my.jsonl" in said(recipe="my.jsonl")
    assert "the built-in recipe is called quickstart" in said(recipe="quickstart.yml")
    assert "RECIPE model=Qwen/Qwen3-0.6B" in said(recipe="Qwen/Qwen3-0.6B")
    assert "expected a list, got text 'wandb'; write sinks=[console,jsonl,wandb]" in said("sinks=wandb")


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("cnt", "expected a list, each item 'count' or 'digits', got text 'cnt'. Did you mean 'count'?"),
        ("digits", "expected a list, got text 'digits'; write kinds=[digits]"),
        ("digits,count", "expected a list, got text 'digits,count'; write kinds=[digits,count]"),
        ("[]", "expected a list of at least 1, got a list of 0"),
    ],
)
def test_a_wrong_list_is_answered_with_what_is_allowed(written: str, hint: str) -> None:
    assert said("data=pictures", f"data.kinds={written}").endswith(f"data.kinds: {hint}")


def test_a_wrong_item_is_one_mistake() -> None:
    """Without it the list is also too short."""
    assert said("data=pictures", "data.kinds=[cnt]").startswith("override 2 (data.kinds=[cnt]): data.kinds.0: expected")


def test_a_bare_value_stands_for_the_setting_that_is_meant(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: quickstart\nmodel: {lora: {rank: 4}}\n")
    changed = load(Recipe, recipe, ["model=Qwen/Qwen3-0.6B", "algorithm.loss.kl=0.02"])
    assert changed.value.model.path == "Qwen/Qwen3-0.6B"
    assert changed.value.model.lora is not None
    assert changed.value.model.lora.rank == 4
    assert changed.value.algorithm.losses["policy"].kl.coefficient == 0.02  # type: ignore[attr-defined]
    assert changed.origins["model.path"] == "override"
    assert "expected a number, got text 'much'" in said("algorithm.loss.kl=much")
