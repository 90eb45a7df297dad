"""Consistency of an algorithm's settings: refused, warned about or completed before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest

from tests.rows import pairs, rows_recipe, write_rows
from tests.toy import read_settings, toy_settings
from whet import api
from whet.algorithms.distillation import OnPolicyDistillation
from whet.algorithms.grpo import GRPO
from whet.algorithms.ppo import PPO
from whet.algorithms.preference import OnlineDPO
from whet.algorithms.prime import PRIME
from whet.base.errors import ConfigError
from whet.chat.renderer import Renderer
from whet.config import dump_yaml, load
from whet.config.explain import annotated_yaml, explain
from whet.core.types import Group
from whet.data.row_kinds import Example
from whet.data.rows import PreferenceRows
from whet.losses.composite import PolicyLoss
from whet.losses.off_policy import TIS, IcePop
from whet.models.config import LoraSettings
from whet.rollouts.config import RolloutConfig
from whet.run.recipe import Recipe

ROWS = {"sft": "supervised", "dpo": "preference", "kto": "labelled", "reward_model": "preference"}
TEACHERS: Any = {"tutor": {"path": "elsewhere"}}


def recipe(algorithm: dict[str, Any], **changes: Any) -> Recipe:
    return read_settings(toy_settings(Path("nowhere"), **changes) | {"algorithm": algorithm})


@pytest.mark.parametrize(
    ("algorithm", "loss", "why"),
    [
        ("sft", "policy", "loss = policy reads advantages, which no part of this algorithm fills"),
        ("sft", "dpo", "loss = dpo trains on pairs of replies, but .* provides single tokens or single replies"),
        ("dpo", "policy", "loss = policy trains on single tokens, but"),
        ("dpo", "kto", "loss = kto trains on single replies, but .* provides pairs"),
        ("dpo", "sft", "loss = sft trains on single tokens, but .* provides pairs"),
        ("dpo", "bradley_terry", "bradley_terry needs the model's values, but this model has a language head"),
        ("kto", "policy", "loss = policy trains on single tokens, but"),
        ("kto", "dpo", "loss = dpo trains on pairs of replies, but .* provides single replies"),
        ("online_dpo", "policy", "loss = policy trains on single tokens, but"),
        ("online_dpo", "kto", "loss = kto trains on single replies, but .* provides pairs"),
        ("grpo", "dpo", "loss = dpo trains on pairs"),
        ("grpo", "simpo", "loss = simpo trains on pairs of replies, but .* provides single tokens or single replies"),
        ("rloo", "orpo", "loss = orpo trains on pairs"),
        ("prime", "simpo", "loss = simpo trains on pairs"),
        ("reward_model", "policy", "policy needs the model's logprobs, but this model has a value head"),
        ("reward_model", "simpo", "simpo needs the model's logprobs, but this model has a value head"),
    ],
)
def test_a_loss_of_another_kind_of_data_is_refused(tmp_path: Path, algorithm: str, loss: str, why: str) -> None:
    settings, path = {"type": algorithm, "loss": loss}, write_rows(tmp_path / "rows.jsonl", pairs(4))
    data = {"data": {"type": ROWS[algorithm], "path": str(path)}} if algorithm in ROWS else {}
    with pytest.raises(ConfigError, match=why):
        recipe(settings, **data)


@pytest.mark.parametrize("advantage", ["group", "reinforce_plus_plus", {"type": "teacher", "reward": "group"}])
def test_a_critic_needs_an_advantage_that_has_returns(advantage: Any) -> None:
    with pytest.raises(ConfigError, match=r"value_loss = value reads returns, which no part of this algorithm fills"):
        recipe({"type": "ppo", "group_size": 2, "minibatches": 1, "advantage": advantage})
    assert "returns" in recipe({"type": "ppo", "minibatches": 1, "advantage": "gae"}).algorithm.reads


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        ({"type": "grpo", "loss": "sft"}, "advantage = group fills advantages, .* choose algorithm.loss=policy"),
        ({"type": "prime", "advantage": "group"}, "reward_logprobs, .* choose algorithm.advantage=process_rewards"),
        ({"type": "prime", "loss": "sft"}, "advantage = process_rewards fills advantages, .* algorithm.loss=policy"),
        (
            {"type": "ppo", "loss": "sft", "minibatches": 1},
            "gae fills advantages, .* algorithm.loss=policy",
        ),
        (
            {"type": "on_policy_distillation", "teachers": TEACHERS, "loss": "sft"},
            "fills .* algorithm.loss=distillation",
        ),
        (
            {"type": "on_policy_distillation", "teachers": TEACHERS, "k": 8, "loss": "on_policy_distillation"},
            "k is set, but .* leave k out, or choose loss=distillation",
        ),
        (
            {"type": "online_dpo", "loss": {"form": "ipo", "label_smoothing": 0.1}},
            "write form: {type: sigmoid",
        ),
        (
            {"type": "online_dpo", "loss": {"form": {"type": "ipo", "label_smoothing": 0.1}}},
            "form.label_smoothing: un",
        ),
        (
            {"type": "on_policy_distillation", "teachers": TEACHERS, "loss": {"mix": 0.1}},
            "write divergence: {type: mixed, mix: ",
        ),
    ],
    ids=str,
)
def test_what_nothing_would_read_is_refused(algorithm: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        recipe(algorithm)


@pytest.mark.parametrize("loss", ["bradley_terry", "score_regression"])
def test_a_reward_model_takes_the_losses_of_its_head(tmp_path: Path, loss: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", pairs(4))
    made = rows_recipe(tmp_path, "preference", path, {"type": "reward_model", "loss": loss})
    assert made.algorithm.reads == frozenset()


class Rated(PreferenceRows):
    """Preferences whose two answers have the score "rating"."""

    def group(self, row: Example, renderer: Renderer) -> Group:
        group = super().group(row, renderer)
        for episode, rating in zip(group.episodes, (2.0, 1.0), strict=True):
            episode.scores["rating"] = rating
        return group


def test_a_margin_that_rows_of_whet_do_not_have_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", pairs(4))
    algorithm = {"type": "reward_model", "loss": {"type": "bradley_terry", "margin": "rating"}}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.margin = 'rating' must be a score of the answers, and"):
        rows_recipe(tmp_path, "preference", path, algorithm)
    assert rows_recipe(tmp_path, f"{__name__}:Rated", path, algorithm)


def test_a_loss_of_pairs_refuses_rows_with_one_answer_each(tmp_path: Path) -> None:
    rows = [{"prompt": "2 + 2?", "answer": str(n), "score": n} for n in range(4)]
    scored = tmp_path, "scored", write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError, match=r"data is scored, .*; set algorithm\.loss=score_regression"):
        rows_recipe(*scored, {"type": "reward_model"})
    assert rows_recipe(*scored, {"type": "reward_model", "loss": "score_regression"})


def test_old_logprobs_are_computed_only_where_a_policy_loss_reads_them() -> None:
    losing = OnPolicyDistillation(teachers=TEACHERS, loss="on_policy_distillation", epochs=2)
    for without_ratio in (OnlineDPO(epochs=2), losing, GRPO()):
        assert "old_logprobs" not in without_ratio.reads
    judging = OnPolicyDistillation(teachers=TEACHERS, loss="policy", advantage="teacher")
    for read in (GRPO(epochs=2), GRPO(minibatches=2), PPO(), judging):
        assert "old_logprobs" in read.reads


def test_distillation_without_a_ratio_is_warned_about_off_policy() -> None:
    def warnings(algorithm: dict[str, Any], **rollouts: Any) -> list[str]:
        settings = {"type": "on_policy_distillation", "teachers": TEACHERS, **algorithm}
        return [line for line in recipe(settings, rollouts=rollouts).warnings() if "has no ratio" in line]

    plain = {"loss": "on_policy_distillation"}
    assert not warnings(plain)
    for several in ({"epochs": 2}, {"minibatches": 3}):
        assert "algorithm.advantage=teacher" in warnings(plain | several)[0]
    assert warnings(plain, max_staleness=1)
    assert not warnings({"loss": "policy", "advantage": "teacher", "epochs": 2})


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo", "prime"])
def test_stale_rollouts_are_corrected_unless_the_recipe_says_otherwise(algorithm: str) -> None:
    in_step = load(Recipe, "quickstart", [f"algorithm={algorithm}"])
    assert policy_loss(in_step.value).correction is None
    ahead = load(Recipe, "quickstart", [f"algorithm={algorithm}", "rollouts.max_staleness=2"])
    assert policy_loss(ahead.value).correction == TIS()
    assert policy_loss(ahead.value).surrogate == policy_loss(in_step.value).surrogate
    assert not ahead.value.warnings()
    assert "from     rollouts.max_staleness" in explain(ahead, "algorithm.loss.correction")
    assert "cap: 2.0" in annotated_yaml(ahead)


@pytest.mark.parametrize(
    ("written", "value"), [("null", None), ("icepop", IcePop()), ("{type: tis, cap: 3}", TIS(cap=3))]
)
def test_a_correction_that_is_written_stays(written: str, value: Any) -> None:
    loss = f"algorithm.loss={{type: policy, correction: {written}}}"
    found = load(Recipe, "quickstart", [loss, "rollouts.max_staleness=2"]).value
    assert policy_loss(found).correction == value
    assert bool(found.warnings()) == (value is None)


@pytest.mark.parametrize("overrides", [(), ("algorithm.group_size=4",), ("algorithm.loss.surrogate.clip_high=0.3",)])
def test_what_else_is_written_of_an_algorithm_changes_nothing_in_that(overrides: tuple[str, ...]) -> None:
    assert policy_loss(load(Recipe, "quickstart", [*overrides, "rollouts.max_staleness=2"]).value).correction == TIS()
    off = [*overrides, "rollouts.max_staleness=2", "algorithm.loss.correction=null"]
    assert policy_loss(load(Recipe, "quickstart", off).value).correction is None


def test_stale_rollouts_are_corrected_from_python_too() -> None:
    ahead = RolloutConfig(max_staleness=1)
    assert policy_loss(api.read("quickstart", rollouts=ahead)).correction == TIS()
    assert policy_loss(api.read("quickstart", rollouts=ahead, algorithm=GRPO())).correction is None


def policy_loss(recipe: Recipe) -> PolicyLoss:
    loss = recipe.algorithm.main.loss
    assert isinstance(loss, PolicyLoss)
    return loss


@pytest.mark.parametrize(
    "reward",
    [
        "group",
        {"type": "gdpo", "components": {"correct": 1.0}},
        {"type": "reinforce_plus_plus", "group_baseline": True},
    ],
)
def test_a_single_answer_is_compared_with_no_other(reward: Any) -> None:
    settings: dict[str, Any] = {
        "teachers": TEACHERS,
        "loss": "policy",
        "advantage": {"type": "teacher", "reward": reward},
    }
    with pytest.raises(ValueError, match=r"group_size = 1 it is always 0"):
        OnPolicyDistillation(**settings)
    assert OnPolicyDistillation(**settings, group_size=2).group_size == 2
    settings["advantage"] = {"type": "teacher", "reward": "reinforce_plus_plus"}
    assert OnPolicyDistillation(**settings).group_size == 1


@pytest.mark.parametrize(
    ("own", "rank"), [({}, 4), ({"lora": False}, None), ({"lora": {"rank": 2}}, 2)], ids=["inherited", "full", "own"]
)
def test_another_reward_model_is_adapted_as_the_policy_is(
    tmp_path: Path, own: dict[str, Any], rank: int | None
) -> None:
    algorithm = {"type": "prime", "reward_model": {"path": "other"} | own}
    made = recipe(algorithm, model={"lora": {"rank": 4}})
    (tmp_path / "recipe.yaml").write_text(dump_yaml(made))
    again = load(Recipe, tmp_path).value  # as a resumed run reads it
    for one in (made, again):
        model = one.algorithm.roles["implicit_reward"].model_config(one.model)
        assert (model.path, model.lora and model.lora.rank) == ("other", rank)
    assert PRIME().roles["implicit_reward"].model_config(made.model).lora == LoraSettings(rank=4)
