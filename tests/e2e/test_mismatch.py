"""Whole runs whose sampler and learner disagree: it is measured under every algorithm that samples, warned of once,
and ends the run where the recipe says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_learning import lines
from tests.toy import toy_recipe
from whet.base.errors import WhetError
from whet.engines.torch.generator import TorchGenerator
from whet.rollouts.config import RolloutConfig
from whet.run import run
from whet.run.mismatch_alarm import MismatchAlarm

NOT_SAVED = {"checkpoints": {"every": 0}, "evaluation": {"enabled": False}}


@pytest.fixture
def misreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every log-prob that the generator reports is too low by 0.1, a factor of 1.105."""
    sample = TorchGenerator.sample

    async def too_low(self: TorchGenerator, *args: Any, **more: Any) -> Any:
        sampled = await sample(self, *args, **more)
        return replace(sampled, logprobs=tuple(value - 0.1 for value in sampled.logprobs))

    monkeypatch.setattr(TorchGenerator, "sample", too_low)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "grpo"},
        {"type": "online_dpo"},
        {"type": "online_dpo", "minibatches": 3},
        {"type": "on_policy_distillation"},
        {"type": "ppo", "critic_warmup": 2, "minibatches": 3},
    ],
    ids=str,
)
def test_it_is_measured_under(algorithm: dict[str, Any], tiny_model: Path, tmp_path: Path, misreported: None) -> None:
    if algorithm["type"] == "on_policy_distillation":
        algorithm = algorithm | {"teachers": {"itself": {"path": str(tiny_model)}}}
    recipe = toy_recipe(tiny_model, steps=1, algorithm=algorithm, **NOT_SAVED)
    last = lines(run.start(recipe, tmp_path / "run"), "train")[-1]
    assert last["mismatch/token_mult_prob_error"] == pytest.approx(1.105, abs=1e-3)
    assert last["mismatch/max"] == pytest.approx(0.1, abs=1e-3)


def test_the_log_warns_of_it_once(tiny_model: Path, tmp_path: Path, misreported: None) -> None:
    folder = run.start(toy_recipe(tiny_model, steps=3, **NOT_SAVED), tmp_path / "run")
    warnings = [line for line in (folder / "log.txt").read_text().splitlines() if "mismatch" in line]
    assert len(warnings) == 1
    assert "in step 1 mismatch/token_mult_prob_error is 1.105, above rollouts.mismatch_alarm = 1.05" in warnings[0]


def test_the_run_stops_at_the_recipes_limit(tiny_model: Path, tmp_path: Path, misreported: None) -> None:
    recipe = toy_recipe(tiny_model, steps=3, rollouts={"max_mismatch": 1.08}, **NOT_SAVED)
    with pytest.raises(WhetError, match=r"in step 1 .* is 1\.105, above rollouts\.max_mismatch = 1\.08"):
        run.start(recipe, tmp_path / "run")
    assert len(lines(tmp_path / "run", "train")) == 2, "the step that went too far is on record"


def test_tokens_of_older_weights_are_named_as_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    MismatchAlarm(RolloutConfig()).check(3, {"mismatch/token_mult_prob_error": 1.2, "staleness/max": 2.0})
    assert "Some were sampled by weights 2 steps old" in caplog.text
