"""References between stages give the order; what is wrong is named with its line before anything runs."""

from pathlib import Path

import pytest

from tests.pipeline.stand_in import jobs, write
from whet.config import RecipeError
from whet.pipeline.job import Reference

BLEND = "validation: 0.0\nsources:\n  a:\n    rows: {type: supervised, path: rows.jsonl}\n"

PROFILE = """\
stages:
  sft:
    type: train
    recipe: sft
    data: {folder}/rows.jsonl
    settings: {{steps: 3, optimizer: {{lr: 0.1}}}}
profiles:
  tiny:
    stages:
      base: {{type: random_model}}
      sft: {{model: base.model, settings: {{optimizer: {{lr: 0.2}}}}}}
"""


def problems(folder: Path, text: str) -> list[str]:
    (folder / "blend.yaml").write_text(BLEND)
    (folder / "prompts.yaml").write_text(BLEND.replace("supervised", "prompts"))
    (folder / "nemotron.yaml").write_text(BLEND.replace("supervised", "nemotron3_nano_rl"))
    with pytest.raises(RecipeError) as caught:
        jobs(write(folder, text))
    return [str(issue).replace(f"{folder}/", "") for issue in caught.value.issues]


@pytest.mark.parametrize("rows", ["supervised", "prompts", "preference"])
def test_prepared_rows_of_any_kind_with_a_prompt_can_be_tasks(rows: str, tmp_path: Path) -> None:
    (tmp_path / "blend.yaml").write_text(BLEND.replace("supervised", rows))
    (tmp_path / "rewards.py").write_text("def right(answer): return 1.0\n")
    text = "stages:\n  p: {{type: prep, recipe: blend.yaml}}\n  a: {{type: train, recipe: grpo, data: p.train, "
    reward = f"settings: {{{{data: {{{{reward: '{tmp_path}/rewards.py:right'}}}}}}}}}}}}\n"
    assert list(jobs(write(tmp_path, text + reward))) == ["p", "a"]


def test_the_order_follows_from_the_references_and_not_from_the_file(tmp_path: Path) -> None:
    stages = jobs(write(tmp_path))
    assert list(stages) == ["base", "sft", "sft.best", "tuned", "tuned.best", "result"]
    assert stages["tuned"].inputs["model"] == Reference("sft.best", "model")
    assert stages["tuned"].value.model.path == f"{tmp_path}/out/sft.best"
    assert stages["sft"].value.rows.path == f"{tmp_path}/rows.jsonl"
    assert stages["sft"].value.steps == 3
    assert stages["sft"].value.epochs is None


def test_a_profile_changes_stages_and_adds_others(tmp_path: Path) -> None:
    file = write(tmp_path, PROFILE)
    plain, tiny = jobs(file), jobs(file, profile="tiny")
    assert plain["sft"].value.model.path == "smollm2-135m-instruct"
    assert plain["sft"].value.optimizer.lr == 0.1
    assert list(tiny) == ["base", "sft"]
    assert tiny["sft"].value.model.path.endswith("/out/base")
    assert (tiny["sft"].value.optimizer.lr, tiny["sft"].value.steps) == (0.2, 3)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ("a: {type: train, recipe: sft, model: b.best}",
         "pipeline.yaml:2: stages.a.model: no stage is called 'b'. Stages: a"),
        ("base: {type: random_model}\n  a: {type: train, recipe: sft, model: base.bets}",
         "pipeline.yaml:3: stages.a.model: stage 'base' has no output 'bets'. Its outputs: model"),
        ("base: {type: random_model}\n  a: {type: train, recipe: sft, model: base}",
         "pipeline.yaml:3: stages.a.model: 'base' is a stage; name one of its outputs: base.model"),
        ("a: {type: train, recipe: sft, model: b.best}\n  b: {type: train, recipe: sft, model: a.last}",
         "the stages form a cycle: "),
        ("a: {type: train, recipe: sft, model: a.best}",
         "pipeline.yaml:2: stages.a.model: the stages form a cycle: a needs a"),
        ("base: {type: random_model}\n  a:\n    type: train\n    recipe: rlhf-quickstart\n    reward_model: base.model",
         "pipeline.yaml:6: stages.a.reward_model: base.model is a model; expected a reward model"),
        ("p: {type: prep, recipe: blend.yaml}\n  a: {type: train, recipe: dpo, data: p.train}",
         "pipeline.yaml:3: stages.a.data: p.train holds rows of messages; the recipe reads prompt, chosen, rejected"),
        ("p: {type: prep, recipe: prompts.yaml}\n  a: {type: train, recipe: sft, data: p.train}",
         "pipeline.yaml:3: stages.a.data: p.train holds rows of prompt; the recipe reads messages"),
        ("p: {type: prep, recipe: nemotron.yaml}\n  a: {type: train, recipe: grpo, data: p.train}",
         "p.train holds rows of responses_create_params; the recipe reads prompt or messages"),
        ("p: {type: prep, recipe: blend.yaml}\n  a: {type: train, recipe: sft, data: p.validation}",
         "pipeline.yaml:3: stages.a.data: stage 'p' has validation = 0, so it writes no validation rows"),
        ("base: {type: random_model}\n  a: {type: export, model: base.model}",
         "pipeline.yaml:3: stages.a.model: export takes a checkpoint of a train stage, and base.model is a model"),
        ("a:\n    type: train\n    recipe: sft\n    data: rows.jsonl\n    settings:\n      optimizer: {lr: fast}",
         "pipeline.yaml:7: stages.a.settings.optimizer.lr: expected a number, got text 'fast'"),
        ("a:\n    type: train\n    recipe: quickstart\n    data: rows.jsonl",
         "pipeline.yaml:5: stages.a.data: unknown key."),
        ("a: {type: train, recipe: stf}",
         "pipeline.yaml:2: stages.a.recipe: 'stf': there is no recipe or run folder of this name."),
        ("a: {type: train, recipe: sft, data: nowhere.jsonl}",
         "pipeline.yaml:2: stages.a.data: nowhere.jsonl does not exist"),
        ("a: {type: train, recipe: sft, data: pairs.jsonl, model: nowhere}",
         "pipeline.yaml:2: stages.a.model: model 'nowhere': there is no such folder."),
        ("a: {type: trian, recipe: sft}",
         "pipeline.yaml:2: stages.a.type: unknown type 'trian'. Did you mean 'train'?"),
        ("a: {type: eval, recipe: sft, model: smollm2-135m-instruct, against: b/c, data: rows.jsonl}",
         "pipeline.yaml:2: stages.a.against: this recipe learns from rows, and only tasks compare two models"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(
    stages: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"stages:\n  {stages}\n".replace("{", "{{").replace("}", "}}")
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert expected in found[0]


def test_an_adapter_must_be_there_unless_a_stage_may_write_it(tmp_path: Path) -> None:
    def stages(adapter: str) -> str:
        lora = "{model: {lora: {rank: 2}}, weights: {lora: adapter}, generator: {type: vllm, adapters: {one: "
        text = "stages:\n  base: {type: random_model}\n  a: {type: train, recipe: quickstart, model: base.model, "
        return f"{text}settings: {lora}{adapter}}}}}}}}}\n".replace("{", "{{").replace("}", "}}")

    (found,) = problems(tmp_path, stages(f"{tmp_path}/nowhere"))
    assert "stages.a.recipe: generator.adapters.one = nowhere is not an adapter in peft's form" in found
    assert list(jobs(write(tmp_path, stages(f"{tmp_path}/out/other/adapter")))) == ["base", "a"]


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    text = "stages:\n  a: {{type: train, recipe: sft, model: b.best}}\n  c: {{type: rows, rollouts: d.rollouts}}\n"
    assert len(problems(tmp_path, text)) == 2
