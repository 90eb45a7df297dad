"""PRIME's advantages, computed by hand, and the algorithm."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algorithms.test_advantages import group_of, make, per_row
from tests.losses.batches import without
from tests.tiny import tiny_tokenizer
from whet.algorithms.grpo import GroupAdvantage
from whet.algorithms.prime import PRIME, ProcessRewards, RewardStart
from whet.algorithms.registry import ADVANTAGES
from whet.base.errors import ConfigError, DataError
from whet.config import SettingsError
from whet.core.batch import Batch
from whet.core.types import Group
from whet.learner.optimizer_config import OptimizerConfig
from whet.models.config import ModelConfig


def judged(groups: list[Group], ratios: list[float]) -> Batch:
    """Return a batch with the reward model's log-ratio at each trained token, in order, and nan elsewhere."""
    batch = Batch.from_groups(groups)
    start = torch.where(batch.trained, -2.0, math.nan).double()
    now = start.clone()
    now[batch.trained] += torch.tensor(ratios).double()
    batch.fill("reward_reference_logprobs", start)
    batch.fill("reward_logprobs", now)
    return batch


def test_process_rewards_of_two_answers_by_hand() -> None:
    batch = judged([group_of([1.0, 0.0])], [4.0, 2.0, -1.0, 1.0])
    advantages = ProcessRewards(beta=0.5, gamma=0.5)(batch).advantages[batch.trained].tolist()
    # Process rewards 2, 1 and -0.5, 0.5 with baselines 0 and 1.5, outcomes +1 and -1.
    assert advantages == pytest.approx([2 + 0.5 * 1 + 1, 1 + 1, -2 + 0.5 * -1 - 1, -1 - 1])


def test_before_the_reward_model_has_moved_process_rewards_are_rloo() -> None:
    batch = judged([group_of([1.0, 0.0, 0.3]), group_of([5.0], "h")], [0.0] * 8)
    rloo = GroupAdvantage(baseline="leave_one_out", divide_by_std=False)
    torch.testing.assert_close(ProcessRewards()(batch).advantages, rloo(batch).advantages)


def test_equal_outcomes_leave_the_process_to_teach() -> None:
    batch = judged([group_of([0.1] * 3)], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    advantages = ProcessRewards(beta=1.0)(batch).advantages[batch.trained].tolist()
    assert advantages == pytest.approx([1.0, 0.0, -0.5, -0.25, -0.5, -0.25])


def test_process_of_a_group_of_one_is_not_compared_with_anything() -> None:
    batch = judged([group_of([5.0])], [3.0, -3.0])
    assert (ProcessRewards()(batch).advantages == 0).all()


def test_process_rewards_of_an_empty_answer_are_nobodys_baseline_but_its_outcome_counts() -> None:
    group = group_of([0.0, 1.0, 0.5])
    group.trajectories[1].spans[1].trained = False
    batch = judged([group], [1.0, 1.0, 3.0, 3.0])
    # Outcomes 0 - 0.75 and 0.5 - 0.5; process baselines 3 and 1, of the only other answer that has any.
    assert ProcessRewards(beta=1.0)(batch).advantages[batch.trained].tolist() == pytest.approx([-4.75, -2.75, 4.0, 2.0])


def test_process_rewards_with_only_empty_partners_are_the_outcome_alone() -> None:
    group = group_of([0.0, 1.0])
    group.trajectories[1].spans[1].trained = False
    assert per_row(judged([group], [9.0, 9.0]), ProcessRewards()(judged([group], [9.0, 9.0])).advantages) == [-1.0]


@pytest.mark.parametrize("column", ["reward_logprobs", "reward_reference_logprobs"])
def test_a_process_column_that_nobody_filled_is_named(column: str) -> None:
    with pytest.raises(DataError, match=f"'{column}'"):
        ProcessRewards()(without(make(0), column))


def test_process_rewards_are_registered_with_these_defaults_and_limits() -> None:
    assert ADVANTAGES["process_rewards"] == "whet.algorithms.prime:ProcessRewards"
    assert ProcessRewards() == ProcessRewards(beta=0.05, gamma=1.0)
    assert ProcessRewards(beta=0.0, gamma=0.0).reads == {"reward_logprobs", "reward_reference_logprobs"}
    settings: dict[str, Any]
    for settings in ({"beta": -0.01}, {"gamma": 1.01}, {"gamma": -0.01}):
        with pytest.raises(SettingsError):
            ProcessRewards(**settings)


def test_prime_trains_a_reward_model_beside_the_policy() -> None:
    prime, shared = PRIME(reward_lr=0.5), OptimizerConfig(lr=0.1)
    roles = prime.roles
    assert prime.main_role == "policy"
    assert prime.losses.keys() == roles.keys() == {"policy", "implicit_reward"}
    rates = [[one.roles[name].optimizer(shared) for name in roles] for one in (prime, PRIME())]
    assert [[own and own.lr for own in each] for each in rates] == [[0.1, 0.5], [0.1, 0.1]]
    own, model = ModelConfig(path="own"), ModelConfig(path="shared")
    other = PRIME(reward_model=RewardStart(path="own")).roles
    assert [other[name].model_config(model) for name in roles] == [model, own]
    assert [roles[name].model_config(model) for name in roles] == [model, model]


def test_a_reward_model_with_another_tokenizer_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    model, larger = ModelConfig(path=str(tiny_model)), ModelConfig(path=str(tmp_path))
    PRIME(reward_model=RewardStart(path=larger.path)).check_models(model)
    with pytest.raises(ConfigError, match=r"algorithm\.reward_model = .* another tokenizer"):
        PRIME(reward_model=RewardStart(path=model.path)).check_models(larger)
