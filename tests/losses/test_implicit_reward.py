"""The loss of an implicit reward model: labels, extreme answers and metrics."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.losses.batches import fill, random_groups, unpaired_groups
from tests.reference import preference as slow
from tests.reference.plain import plain, plain_output
from whet.base.errors import DataError
from whet.config import SettingsError
from whet.core.batch import Batch, ModelOutput
from whet.losses.base import LOSSES
from whet.losses.implicit_reward import ImplicitReward


def rows(seed: int = 0) -> tuple[Batch, ModelOutput]:
    return fill(unpaired_groups(seed), seed, "sequence")


def test_a_model_that_has_not_moved_yet_costs_a_coin_toss_per_answer() -> None:
    batch, output = rows()
    loss, metrics = ImplicitReward()(replace(output, logprobs=batch.column("reward_reference_logprobs")), batch)
    assert loss.item() == pytest.approx(math.log(2))
    assert metrics.result()["outcome/right_reward"] == metrics.result()["outcome/wrong_reward"] == 0


def test_the_gradient_raises_right_answers_and_lowers_wrong_ones() -> None:
    batch, output = rows()
    ImplicitReward()(output, batch)[0].backward()
    assert output.logprobs.grad is not None
    descent = batch.per_sequence(-output.logprobs.grad)
    trains = batch.trained_per_sequence > 0
    assert (descent[trains & (batch.reward == 1)] > 0).all()
    assert (descent[trains & (batch.reward == 0)] < 0).all()


@pytest.mark.parametrize("gap", [1e5, -1e5])
def test_extreme_implicit_rewards_leave_loss_and_gradient_finite(gap: float) -> None:
    batch, output = rows()
    logprobs = torch.where(batch.trained, gap, math.nan).double().requires_grad_()
    loss, _ = ImplicitReward()(replace(output, logprobs=logprobs), batch)
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("bad", [-0.01, 1.01, math.nan, math.inf])
def test_an_outcome_that_is_no_probability_names_its_group_and_what_to_do(bad: float) -> None:
    batch, output = rows()
    row = batch.trained_per_sequence.tolist().index(1)
    batch.reward[row] = bad
    with pytest.raises(DataError, match=rf"'row-{row}': the reward .* algorithm\.reward_loss\.outcome"):
        ImplicitReward()(output, batch)
    batch.scores["correct"] = batch.reward
    with pytest.raises(DataError, match=rf"'row-{row}': the score 'correct'"):
        ImplicitReward(outcome="correct")(output, batch)


def test_the_outcome_of_an_answer_that_trains_nothing_does_not_matter() -> None:
    batch, output = fill(random_groups(0), 0, "sequence")
    batch.reward = torch.where(batch.trained_per_sequence > 0, 1.0, -7.0).double()
    assert (batch.reward < 0).any()
    loss, _ = ImplicitReward()(output, batch)
    assert math.isfinite(loss.item())


def test_a_score_that_no_answer_carries_is_named() -> None:
    batch, output = rows()
    with pytest.raises(DataError, match=r"'colour'.*correct, format, constant"):
        ImplicitReward(outcome="colour")(output, batch)
    batch.scores = {}
    with pytest.raises(DataError, match=r"scores are: none$"):
        ImplicitReward(outcome="colour")(output, batch)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_an_implicit_reward_reports_how_well_it_tells_right_from_wrong(seed: int) -> None:
    batch, output = fill(random_groups(seed), seed, "sequence")
    loss = ImplicitReward(beta=0.3, outcome="format")
    metrics = loss(output, batch)[1].result()
    b, now = plain(batch), plain_output(output)
    judged = [
        (slow.implicit(now, b, row, 0.3), b.scores["format"][i] > 0.5) for i, row in enumerate(b.rows) if row.tokens
    ]
    assert len(judged) < len(b.rows)
    assert metrics["outcome/accuracy"] == pytest.approx(
        sum((reward > 0) == right for reward, right in judged) / len(judged)
    )
    for name, kind in (("right", True), ("wrong", False)):
        rewards = [reward for reward, right in judged if right is kind]
        assert metrics[f"outcome/{name}_reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_an_undecided_reward_and_an_undecided_outcome_count_half() -> None:
    batch, output = rows()
    level = replace(output, logprobs=batch.column("reward_reference_logprobs"))
    assert ImplicitReward()(level, batch)[1].result()["outcome/accuracy"] == 0.5
    batch.reward[:] = 0.5
    sure = replace(output, logprobs=level.logprobs + 1.0)
    metrics = ImplicitReward()(sure, batch)[1].result()
    assert metrics["outcome/accuracy"] == 0.5
    assert "outcome/right_reward" not in metrics


def test_implicit_reward_is_registered_with_these_defaults_and_limits() -> None:
    assert LOSSES["implicit_reward"] == "whet.losses.implicit_reward:ImplicitReward"
    assert ImplicitReward() == ImplicitReward(beta=0.05, outcome=None)
    assert (ImplicitReward().reads, ImplicitReward().unit) == ({"reward_reference_logprobs"}, "sequence")
    settings: dict[str, Any]
    for settings in ({"beta": 0.0}, {"beta": -1.0}):
        with pytest.raises(SettingsError):
            ImplicitReward(**settings)
