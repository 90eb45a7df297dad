"""Whole runs on prompts with images: GRPO in step and asynchronously, rows, reward models, also resumed, and export."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Idefics3Model

from tests.rows import pairs, rows_recipe, write_rows
from tests.tiny_vision import FAMILIES, Family, asked, picture, saved_families
from tests.toy import toy_recipe
from whet.base.errors import ConfigError
from whet.checkpoint.export import export
from whet.config.issues import RecipeError
from whet.core.content import image_urls
from whet.core.types import Task
from whet.metrics.rollout_file import read_rollouts
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.models.config import ModelConfig
from whet.models.loading import load_images, load_model
from whet.models.reward_model import RewardModel
from whet.models.tiny import tiny_tokenizer
from whet.run import run
from whet.tasks.base import TaskSet

COLORS = ("red", "blue", "green", "black")
TWO: dict[str, Any] = {"cluster": {"type": "processes"}}
MEGATRON = {"type": "megatron", "precision": "float32"}


class Colors(TaskSet):
    """The reward is the share of the letters of the picture's colour in the reply."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        letters = set(COLORS[int(task.uid.rpartition("/")[2]) % len(COLORS)])
        return {"reward": sum(letter in letters for letter in answer) / max(len(answer), 1)}

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"colors/{split}/{i}", [asked(picture(COLORS[i % len(COLORS)], 30 + i, 20))]) for i in range(8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    return saved_families(tmp_path_factory, FAMILIES)


@pytest.fixture(scope="module")
def model(models: dict[Family, Path]) -> Path:
    return models["idefics3"]


def recipe_of(model: Path, vision: str = "trained", lora: dict[str, int] | None = None, **changes: Any) -> Any:
    data = {"type": "tests.e2e.test_images:Colors"}
    return toy_recipe(model, data=data, model={"path": str(model), "vision": vision, "lora": lora}, **changes)


def losses(folder: Path) -> list[Any]:
    return [without_time(line) for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("family", "vision", "lora", "learner"),
    [
        ("idefics3", "trained", None, {}),
        *(
            pytest.param(*setting, {}, marks=pytest.mark.slow)
            for setting in [
                ("gemma4", "frozen", {"rank": 2}),
                ("qwen3_5", "trained", None),
                ("idefics3", "frozen", None),
                ("smolvlm", "frozen", None),
                ("qwen2_5_vl", "trained", None),
                ("qwen3_vl", "trained", None),
                ("internvl", "trained", None),
                ("gemma3", "trained", None),
                ("qwen3_vl", "frozen", {"rank": 2}),
            ]
        ),
        pytest.param("qwen2_5_vl", "trained", None, MEGATRON, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", "frozen", {"rank": 2}, MEGATRON, marks=pytest.mark.slow),
    ],
)
def test_a_policy_learns_on_images_and_resumes_to_the_same_bits(
    models: dict[Family, Path],
    tmp_path: Path,
    family: Family,
    vision: str,
    lora: dict[str, int] | None,
    learner: dict[str, str],
) -> None:
    if learner:
        pytest.importorskip("megatron.core", reason="needs Megatron Core: pip install 'whet[megatron]'")
    model = models[family]
    rollouts = {"max_staleness": 1 if vision == "trained" else 0, "prompts_per_step": 4}
    settings = {"rollouts": rollouts, "learner": learner}
    plain = run.start(recipe_of(model, vision, lora, steps=3, **settings), tmp_path / "plain")
    parts = run.start(recipe_of(model, vision, lora, steps=2, **settings), tmp_path / "parts")
    run.resume(parts, ["steps=3"])
    assert losses(parts) == losses(plain)
    assert any(line.get("loss") for line in losses(plain))
    for record in read_rollouts(plain, 3):
        assert "Which colour?" in record.prompt
        assert len(image_urls(record.messages)) == 1
    exported = export(plain, tmp_path / "exported").path
    url = picture("green")
    again, before = (load_images(ModelConfig(path=str(path), vision="frozen")) for path in (exported, model))
    assert again.tokens(url) == before.tokens(url)
    assert torch.equal(again.inputs(url)["pixel_values"], before.inputs(url)["pixel_values"])
    learned = load_model(ModelConfig(path=str(exported), vision="frozen"), dtype=torch.float32)
    assert learned.config.model_type == family


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("qwen3_vl", TWO | {"parallel": {"fsdp": 2}}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", TWO | {"parallel": {"pipeline": 2}}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", {"learner": MEGATRON}, marks=pytest.mark.slow),
        pytest.param(
            "qwen2_5_vl", TWO | {"learner": MEGATRON, "parallel": {"tensor": 2, "pipeline": 2}}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_in_another_layout_learns_the_same_from_images(
    models: dict[Family, Path], tmp_path: Path, family: Family, changes: dict[str, Any]
) -> None:
    """Compared with one process of transformers' layers; refits are proven by the same probe and digests."""
    if "learner" in changes:
        pytest.importorskip("megatron.core", reason="needs Megatron Core: pip install 'whet[megatron]'")
    rollouts = {"prompts_per_step": 4}
    alone, spread = (
        run.start(recipe_of(models[family], steps=2, rollouts=rollouts, **more), tmp_path / name)
        for name, more in {"alone": {}, "spread": changes}.items()
    )
    norms = [
        [line["gradient_norm"] for line in losses(folder) if "gradient_norm" in line] for folder in (alone, spread)
    ]
    assert len(norms[0]) == 2
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.parametrize("algorithm", [pytest.param("ppo", marks=pytest.mark.slow), "gspo"])
def test_other_algorithms_learn_on_images(model: Path, tmp_path: Path, algorithm: str) -> None:
    rollouts = {"prompts_per_step": 4}
    folder = run.start(recipe_of(model, steps=2, algorithm={"type": algorithm}, rollouts=rollouts), tmp_path / "run")
    assert any(line.get("loss") for line in losses(folder))


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("supervised", "sft"), ("preference", "dpo"), pytest.param("labelled", "kto", marks=pytest.mark.slow)],
)
def test_rows_with_images_are_learned(model: Path, tmp_path: Path, kind: str, algorithm: str) -> None:
    answers = {"supervised": ("completion",), "preference": ("chosen", "rejected"), "labelled": ("completion",)}[kind]
    rows = [
        {"prompt": "Which colour?", "image": picture(color), "label": index % 2 == 0}
        | {name: COLORS[(index + place) % 4] for place, name in enumerate(answers)}
        for index, color in enumerate(COLORS * 4)
    ]
    recipe = rows_recipe(model, kind, write_rows(tmp_path / "rows.jsonl", rows), {"type": algorithm}, steps=2)
    recipe = recipe.model_copy(update={"model": ModelConfig(path=str(model), vision="trained")})
    assert any(line.get("loss") for line in losses(run.start(recipe, tmp_path / "run")))


def judge_recipe(model: Path, folder: Path, **changes: Any) -> Any:
    """Return a recipe of a reward model that likes the name of the picture's colour."""
    rows = [
        {
            "prompt": "Which colour?",
            "image": picture(color, 20 + index),
            "chosen": color,
            "rejected": COLORS[(index + 1) % 4],
        }
        for index, color in enumerate(COLORS * 8)
    ]
    settings: dict[str, Any] = {"steps": 4, "checkpoints": {"every": 2}, "optimizer": {"lr": 0.01}} | changes
    path = write_rows(folder / "pairs.jsonl", rows)
    recipe = rows_recipe(model, "preference", path, {"type": "reward_model"}, **settings)
    return recipe.model_copy(update={"model": ModelConfig(path=str(model), vision="trained")})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_reward_model_of_images_resumes_to_the_same_bits_and_rewards_a_policy(
    models: dict[Family, Path], tmp_path: Path, family: Family
) -> None:
    model = models[family]
    plain = run.start(judge_recipe(model, tmp_path), tmp_path / "plain")
    parts = run.start(judge_recipe(model, tmp_path, steps=2), tmp_path / "parts")
    run.resume(parts, ["steps=4"])
    assert losses(parts) == losses(plain)
    seen = [line for line in read_metrics(plain / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert {"evaluation/loss", "evaluation/accuracy"} <= seen[-1].keys()
    judge = export(plain, tmp_path / "judge").path

    data = {"type": "reward_model", "taskset": {"type": "tests.e2e.test_images:Colors"}, "model": str(judge)}
    data |= {"process": {"batch_size": 1}}
    recipe = toy_recipe(
        model, data=data, model={"path": str(model), "vision": "trained"}, steps=2, rollouts={"prompts_per_step": 2}
    )
    folder = run.start(recipe, tmp_path / "policy")
    again = run.start(recipe, tmp_path / "again")
    assert losses(again) == losses(folder)
    for line in losses(folder)[1:]:
        assert line["reward/mean"] == pytest.approx(line["scores/reward_model"], abs=1e-6)
    served = RewardModel(str(judge), None, "cpu", "float32", 1)
    for record in read_rollouts(folder, 2):
        (score,) = served.scores([{"messages": record.messages, "tools": None}])
        assert record.scores["reward_model"] == pytest.approx(score, abs=1e-5)


def test_a_reward_model_that_could_not_be_exported_is_refused_before_it_learns(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Idefics3Model, "can_generate", classmethod(lambda _: True))  # as Llama 4's, which has a head
    with pytest.raises(ConfigError, match="could not be exported: transformers has no sequence classifier of Idefics3"):
        run.start(judge_recipe(model, tmp_path), tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_reward_model_that_computes_with_its_padding_token_keeps_it(
    models: dict[Family, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["gemma4"], model)
    out = export(run.start(judge_recipe(model, tmp_path, steps=2), tmp_path / "run"), tmp_path / "judge").path
    config = json.loads((out / "config.json").read_text())
    assert config["pad_token_id"] == config["text_config"]["pad_token_id"] == 0

    settings = json.loads((model / "config.json").read_text())
    (last,) = tiny_tokenizer().encode("\n")  # with which the template ends conversations
    settings["text_config"]["pad_token_id"] = last
    (model / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=f"computes with its padding token {last} at images, and that token ends"):
        run.start(judge_recipe(model, tmp_path), tmp_path / "refused")


def test_a_reward_model_of_texts_refuses_images_in_words(tiny_model: Path, tmp_path: Path) -> None:
    recipe = rows_recipe(tiny_model, "preference", write_rows(tmp_path / "rows.jsonl", pairs(16)),
                         {"type": "reward_model"}, steps=1, checkpoints={"every": 1})  # fmt: skip
    judge = export(run.start(recipe, tmp_path / "run"), tmp_path / "judge").path
    talk = [asked(picture("red")), {"role": "assistant", "content": "red"}]
    (refused,) = RewardModel(str(judge), None, "cpu", "float32", 1).scores([{"messages": talk, "tools": None}])
    assert "has an image, and the reward model reads texts only; train one with model.vision" in str(refused)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"generator": {"type": "vllm", "tensor": 2}}, "generator.tensor = 2"),
        ({"generator": {"type": "vllm", "quantization": "fp8", "dtype": "bfloat16"}}, "generator.quantization"),
        ({"generator": "vllm", "weights": {"lora": "adapter"}, "lora": {"rank": 4}}, "weights.lora = adapter"),
        ({"algorithm": {"type": "on_policy_distillation", "teachers": {"a": "other"}}}, "a second model in algorithm"),
    ],
)
def test_what_cannot_read_images_is_refused_in_the_recipe(model: Path, changes: dict[str, Any], name: str) -> None:
    with pytest.raises((RecipeError, ValueError), match=f"model.vision = trained reads images, which .*{name}"):
        recipe_of(model, **changes)


def test_a_trained_vision_tower_is_refused_where_servers_keep_what_it_computed(model: Path) -> None:
    generator = {"type": "remote", "urls": ["http://127.0.0.1:8000"], "protocol": "sglang"}
    with pytest.raises((RecipeError, ValueError), match="servers of SGLang go on using what they have computed"):
        recipe_of(model, "trained", generator=generator)
