"""Whole runs of models with recurrent and linear layers: sampled by transformers' caches, prompts shared by states."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.e2e.test_learning import lines
from tests.e2e.test_resume import metrics
from tests.grids import grid
from tests.rows import rows_recipe, texts, write_rows
from tests.tiny import tiny_granite, tiny_qwen3_5
from tests.toy import save_tiny_model, toy_recipe
from whet.run import run

FAMILIES = [tiny_granite, tiny_qwen3_5]


@pytest.mark.parametrize(("family", "kind"), grid(FAMILIES, ["sft", "grpo"]))
def test_a_run_agrees_with_its_generator_and_resumes_to_the_same_bits(
    family: Callable[..., PreTrainedModel], kind: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", family)
    if kind == "grpo":
        recipe = toy_recipe(model, steps=3)
    else:
        recipe = rows_recipe(
            model, "supervised", write_rows(tmp_path / "texts.jsonl", texts(12)), {"type": "sft"}, steps=3
        )
    whole = run.start(recipe, tmp_path / "whole")
    halves = run.start(recipe.model_copy(update={"steps": 2}), tmp_path / "halves")
    run.resume(halves, ["steps=3"])
    steps, resumed = lines(whole, "train")[1:], lines(halves, "train")[1:]
    assert [line["loss"] for line in steps] == [line["loss"] for line in resumed]
    assert metrics(whole)[-1] == metrics(halves)[-1]
    if kind == "grpo":
        assert max(line["mismatch/token_mult_prob_error"] for line in steps) < 1.00001
        assert max(line["refit/probe_max"] for line in steps) < 1e-4
        rows = recipe.online.group_size * recipe.rollouts.prompts_per_step
        assert all(line["batch/tokens"] < line["answer/tokens"] + rows * 30 / 2 for line in steps), "prompts are shared"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"learner": {"activation_checkpointing": True}},
        {"cluster": {"type": "processes"}, "parallel": {"fsdp": 2}},
        {"model": {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}}},
        {"rollouts": {"prompts_per_step": 3, "max_staleness": 1}, "optimizer": {"lr": 1e-6}},
    ],
    ids=["checkpointing", "two ranks", "lora", "one step off"],
)
def test_it_also_agrees_where_prompts_are_not_shared_and_out_of_step(
    changes: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", tiny_granite)
    steps = lines(run.start(toy_recipe(model, steps=3, **changes), tmp_path / "run"), "train")[1:]
    assert max(line["mismatch/token_mult_prob_error"] for line in steps) < 1.0001
