"""Settings that no part of a run reads are errors."""

from pathlib import Path

import pytest

from whet.config import RecipeError, list_recipes, load
from whet.config.tree import from_plain
from whet.run.recipe import Recipe
from whet.run.unread import unread_by_rows


def complaint(recipe: str | Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(Recipe, recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("generator=vllm", "generator"),
        ("generator.max_batch=3", "generator.max_batch"),
        ("sampling.temperature=0.5", "sampling.temperature"),
        ("rollouts.max_staleness=2", "rollouts.max_staleness"),
        ("rollouts.curriculum=pass_rate", "rollouts.curriculum"),
        ("weights.probe=false", "weights.probe"),
        ("evaluation.temperature=0.5", "evaluation.temperature"),
        ("evaluation.samples=4", "evaluation.samples"),
    ],
)
def test_what_a_run_that_learns_from_rows_does_not_read_is_an_error(override: str, key: str) -> None:
    assert complaint("sft-gsm8k", override) == (
        f"override 1 ({override}): {key}: no part of the run reads it: this run learns from rows and samples nothing; "
        "leave it out"
    )


@pytest.mark.parametrize("override", ["evaluation.limit=4", "evaluation.split=train", "evaluation.enabled=false"])
def test_what_it_does_read_is_not(override: str) -> None:
    load(Recipe, "sft-gsm8k", [override])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optimizer.schedule=constant"], "optimizer.min_lr_ratio"),
        (["algorithm=sft", "data={type: supervised, path: x.jsonl}"], "sampling.max_new_tokens"),
    ],
)
def test_what_an_override_makes_unused_in_a_file_is_left_out(overrides: list[str], key: str) -> None:
    assert load(Recipe, "quickstart").origins[key].startswith("quickstart.yaml:")
    assert load(Recipe, "quickstart", overrides).origins[key] == "default"


def test_settings_of_another_file_are_checked_alike() -> None:
    even = from_plain({"optimizer": {"schedule": "constant"}}, "all.yaml:9")
    assert load(Recipe, "quickstart", settings=even).origins["optimizer.min_lr_ratio"] == "default"
    vain = from_plain({"optimizer": {"schedule": "constant", "min_lr_ratio": 0.2}}, "all.yaml:9")
    with pytest.raises(RecipeError, match=r"all\.yaml:9: optimizer\.min_lr_ratio: it is read only where"):
        load(Recipe, "quickstart", settings=vain)


def test_what_is_unused_in_a_file_without_the_overrides_is_an_error_with_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\noptimizer:\n  schedule: constant\n  min_lr_ratio: 0.1\n")
    assert f"{path}:4: optimizer.min_lr_ratio: it is read only where" in complaint(path, "steps=3")


def test_each_such_setting_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: sft-gsm8k\nsampling:\n  top_k: 3\nrollouts:\n  retries: 9\n")
    said = complaint(path).splitlines()
    assert said[0] == "2 problems in the recipe:"
    assert f"{path}:3: sampling.top_k: no part of the run reads it" in said[1]
    assert f"{path}:5: rollouts.retries: no part of the run reads it" in said[2]


def test_what_a_parent_set_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: quickstart\ngenerator: vllm\n")
    path = tmp_path / "mine.yaml"
    path.write_text("extends: base.yaml\nalgorithm: {type: sft}\ndata: {type: supervised, path: x.jsonl}\n")
    loaded = load(Recipe, path)
    assert not list(unread_by_rows(loaded.value))
    assert loaded.origins["sampling.max_new_tokens"] == "default"
    assert loaded.origins["optimizer.lr"].startswith("quickstart.yaml:")


def test_a_default_that_is_written_out_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: sft-gsm8k\nrollouts: {retries: 2}\ngenerator: torch\n")
    assert not list(unread_by_rows(load(Recipe, path).value))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["generator=vllm", "weights.folder=/tmp/w"], "weights.folder"),
        (["generator=vllm", "weights.deadline=20"], "weights.deadline"),
        (["generator=vllm", "weights.digest=false", "weights.columns=4"], "weights.columns"),
        (["weights.probe=false", "weights.probe_tokens=4"], "weights.probe_tokens"),
        (["generator={type: vllm, sleep_level: 2}"], "generator.sleep_level"),
        (["generator.prefix_weight=3"], "generator.prefix_weight"),
        (["generator.restarts=3", "generator.restarts=1"], "generator.restarts"),
        (["generator.on_refit=keep"], "generator.on_refit"),
        (["sampling.max_observation_tokens=100"], "sampling.max_observation_tokens"),
        (["sampling.max_new_tokens=64", "sampling.thinking_budget=64"], "sampling.thinking_budget"),
        (["sampling.temperature=0", "sampling.top_k=4"], "sampling.top_k"),
        (["rollouts.retries=0", "rollouts.retry_delay=4"], "rollouts.retry_delay"),
        (["optimizer.schedule=constant", "optimizer.min_lr_ratio=0.1"], "optimizer.min_lr_ratio"),
        (["parallel.sequence_parallel=false"], "parallel.sequence_parallel"),
        (["devices.deadline=20"], "devices.deadline"),
        (["algorithm={type: dr_grpo, advantage: {eps: 0.1}}"], "algorithm.advantage.eps"),
        (["algorithm={type: ppo, advantage: {whiten: false, std: population}}"], "algorithm.advantage.std"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_read_only_beside_another_setting_is_an_error_without_it(overrides: list[str], key: str) -> None:
    said = complaint("grpo-gsm8k", *overrides)
    assert f"({overrides[-1]}): {key}: it is read only where " in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["generator=vllm", "weights.transport=disk", "weights.folder=/tmp/w"],
        ["generator=vllm", "weights.transport=collective", "weights.deadline=20"],
        ["generator.replicas=2", "generator.prefix_weight=3", "generator.restarts=1"],
        ["rollouts.max_staleness=1", "generator.on_refit=keep"],
        ["sampling.max_turns=2", "sampling.max_observation_tokens=100"],
        ["generator={type: vllm, sleep_level: 2}", "devices={placement: colocated, deadline: 20}"],
    ],
    ids=str,
)
def test_beside_it_each_is_read(overrides: list[str]) -> None:
    load(Recipe, "grpo-gsm8k", overrides)


@pytest.mark.parametrize("recipe", list_recipes())
def test_every_setting_of_the_recipes_that_come_with_whet_is_read(recipe: str) -> None:
    assert not list(unread_by_rows(load(Recipe, recipe).value))


def test_a_rows_weight_divided_by_the_longest_needs_to_know_it() -> None:
    assert "set data.max_tokens" in complaint("sft-gsm8k", "algorithm.weighting=constant", "data.max_tokens=null")
