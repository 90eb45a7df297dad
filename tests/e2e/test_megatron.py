"""Whole runs with a learner of Megatron Core's layers, and what it refuses before a run starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.e2e.test_learning import lines
from tests.learner.parts import save_model
from tests.tiny import tiny_deepseek, tiny_gemma, tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.toy import save_tiny_model, toy_recipe
from whet.base.errors import ConfigError
from whet.models.config import ModelConfig
from whet.run import run
from whet.run.build import check_megatron

MEGATRON = {"type": "megatron"}
NEEDED = "needs Megatron Core: pip install 'whet[megatron]'"


def trained(source: Path, folder: Path, steps: int, learner: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run; ``source``: the folder of its model."""
    exact = {"precision": "float64", **learner}
    recipe = toy_recipe(source, steps=steps, learner=exact, checkpoints={"every": 0}, **changes)
    return lines(run.start(recipe, folder), "train")[1:]


def on(**layout: int) -> dict[str, Any]:
    """Return the changes to a recipe for a learner of several ranks."""
    return {"cluster": "processes", "parallel": layout}


LORA = {"model": {"lora": {"rank": 4, "alpha": 8.0}}}


@pytest.mark.parametrize(
    ("model", "steps", "ours", "theirs"),
    [
        pytest.param(tiny_llama, 4, {}, {}, id="one process"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.slow)
            for name, case in {
                "four processes": (tiny_llama, 20, {}, on(tensor=2, pipeline=2)),
                "experts": (tiny_qwen3_moe, 20, {}, on(tensor=2, expert=2)),
                "both with fsdp": (tiny_qwen3, 20, on(fsdp=2), on(fsdp=2)),
                "fsdp and tensor": (tiny_llama, 20, on(fsdp=2), on(tensor=2)),
                "lora": (tiny_llama, 20, LORA, LORA | on(tensor=2)),
                "latent attention": (tiny_deepseek, 20, {}, on(tensor=2, expert=2)),
            }.items()
        ),
    ],
)
def test_a_run_gets_the_rewards_of_torch(
    tmp_path: Path, model: Callable[[], PreTrainedModel], steps: int, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Refits are proven by the same probe and digests; a run without the proof would have stopped. ``ours`` and
    ``theirs``: changes to the recipe of torch's learner and of Megatron Core's."""
    pytest.importorskip("megatron.core", reason=NEEDED)
    tiny_model = save_tiny_model(tmp_path / "model", model)
    expected = trained(tiny_model, tmp_path / "torch", steps, {}, **ours)
    found = trained(tiny_model, tmp_path / "megatron", steps, MEGATRON, **theirs)
    assert len(expected) == len(found) == steps
    assert len({line["reward/mean"] for line in expected}) > steps / 2  # rewards that could differ
    assert [line["reward/mean"] for line in found] == [line["reward/mean"] for line in expected]
    assert [line["gradient_norm"] for line in found] == pytest.approx(
        [line["gradient_norm"] for line in expected], rel=1e-6
    )


@pytest.mark.slow
def test_a_run_with_the_distributed_optimizer_gets_the_rewards_of_fsdp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core", reason=NEEDED)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))  # of the ranks
    (tmp_path / "temporary").mkdir()
    model, learner = save_tiny_model(tmp_path / "model", tiny_qwen3), MEGATRON | {"precision": "float32"}
    expected = trained(model, tmp_path / "fsdp", 12, learner, **on(fsdp=2))
    found = trained(model, tmp_path / "shared", 12, learner | {"distributed_optimizer": True}, **on(fsdp=2))
    assert len({line["reward/mean"] for line in expected}) > 6  # rewards that could differ
    assert [line["reward/mean"] for line in found] == [line["reward/mean"] for line in expected]
    assert [line["gradient_norm"] for line in found] == pytest.approx(
        [line["gradient_norm"] for line in expected], rel=1e-4
    )
    assert not list((tmp_path / "temporary").glob("tmp*")), "the packages that a rank imports leave nothing"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"learner": MEGATRON | {"distributed_optimizer": True}},
            r"learner\.distributed_optimizer = true shares moments among the ranks .* but both are 1",
        ),
        (
            {"learner": {"distributed_optimizer": True}, "parallel": {"fsdp": 2}, "cluster": "processes"},
            r"is Megatron Core's; set learner\.type=megatron",
        ),
        ({"model": {"lora": {"dora": True}}}, r"learner\.type = megatron does not support model\.lora\.dora"),
        ({"parallel": {"fsdp": 2, "cpu_offload": True}, "cluster": "processes"}, r"support parallel\.cpu_offload"),
        ({"learner": MEGATRON | {"compile": True, "balance": 0.1}}, r"learner\.compile, learner\.balance"),
        (
            {"rollouts": {"router_replay": True, "prompts_per_step": 3}},
            r"router_replay .* do not reach layers of learner\.type = megatron",
        ),
        ({"optimizer": {"type": "muon"}}, r"optimizer\.type = muon needs the matrices of the model one by one"),
    ],
)
def test_what_it_does_not_support_is_refused_when_the_recipe_is_read(
    tiny_model: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        toy_recipe(tiny_model, **{"learner": MEGATRON} | settings)


def test_a_model_of_another_family_is_refused_before_anything_is_started(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("megatron.core", reason=NEEDED)
    recipe = toy_recipe(tiny_model, learner=MEGATRON)
    check_megatron(recipe)
    gemma = ModelConfig(path=str(save_model(tmp_path, tiny_gemma())))
    with pytest.raises(ConfigError, match=r"policy: model_type gemma3_text is not one of llama, .*; use"):
        check_megatron(recipe.model_copy(update={"model": gemma}))
