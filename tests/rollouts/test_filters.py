"""The filters of groups."""

from typing import Any

import pytest

from tests.groups import group
from whet.base.errors import ConfigError
from whet.config import SettingsError
from whet.config.component import Component
from whet.core.types import Status
from whet.rollouts.filters import (
    FILTERS,
    BestAndWorst,
    DynamicSampling,
    Filter,
    OverlongFilter,
    OverlongShaping,
    PassRate,
)


def test_registered_names_lead_to_their_classes() -> None:
    assert {name: Component(FILTERS).resolve(name)[0] for name in FILTERS} == {
        "dynamic_sampling": DynamicSampling,
        "pass_rate": PassRate,
        "overlong_shaping": OverlongShaping,
        "overlong_filter": OverlongFilter,
        "best_and_worst": BestAndWorst,
    }


def test_dynamic_sampling_drops_groups_without_spread_and_only_those() -> None:
    assert DynamicSampling()(group("g", [1], [[2], [3]], [0.5, 0.5])) is None
    mixed = group("g", [1], [[2], [3]], [0.0, 1.0])
    assert DynamicSampling()(mixed) is mixed


@pytest.mark.parametrize(("length", "shaping"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (30, -1.0)])
def test_overlong_shaping_grows_linearly_over_the_buffer(length: int, shaping: float) -> None:
    shaped = OverlongShaping(limit=10, buffer=4)(group("g", [1], [[2] * length], [1.0]))
    assert shaped is not None
    assert shaped.episodes[0].reward == pytest.approx(1.0 + shaping)
    assert shaped.episodes[0].scores["overlong"] == pytest.approx(shaping)


def test_overlong_shaping_counts_the_tokens_of_all_turns() -> None:
    two_turns = group("g", [1], [[2] * 5], [0.0])
    two_turns.trajectories[0].spans *= 2
    shaped = OverlongShaping(limit=10, buffer=4, penalty=2.0)(two_turns)
    assert shaped is not None
    assert shaped.episodes[0].reward == pytest.approx(-2.0)


def test_the_overlong_filter_trains_nothing_on_truncated_answers_and_keeps_their_reward() -> None:
    made = group("g", [1], [[2, 3], [4, 5]], [0.0, 1.0])
    made.episodes[0].status = Status.TRUNCATED
    filtered = OverlongFilter()(made)
    assert filtered is not None
    assert [t.trained_tokens for t in filtered.episodes] == [0, 2]
    assert [t.reward for t in filtered.episodes] == [0.0, 1.0]
    assert made.trajectories[0].trained_tokens == 2, "the recorded group is not changed"


def test_the_best_and_the_worst_answer_become_a_pair_of_which_the_first_is_better() -> None:
    made = group("g", [1], [[2], [3], [4], [5], [6]], [0.5, -1.0, 2.0, 2.0, -1.0])
    pair = BestAndWorst()(made)
    assert pair is not None
    assert [(e.branches[0].tokens, e.reward) for e in pair.episodes] == [([1, 4], 2.0), ([1, 3], -1.0)]
    assert (pair.uid, pair.task, len(made.episodes)) == ("g", made.task, 5)
    assert BestAndWorst()(group("g", [1], [[2], [3], [4]], [0.5, 0.5, 0.5])) is None


def test_an_episode_without_an_answer_is_in_no_pair() -> None:
    made = group("g", [1], [[2], [3], [4]], [0.5, 1.0, 0.0])
    made.episodes[2].branches = []
    pair = BestAndWorst()(made)
    assert pair is not None
    assert [episode.reward for episode in pair.episodes] == [1.0, 0.5]
    made.episodes[1].branches = []
    assert BestAndWorst()(made) is None
    made.episodes[0].branches = []
    assert BestAndWorst()(made) is None


@pytest.mark.parametrize(("right", "kept"), [(0, False), (1, True), (2, True), (4, True), (5, False)])
def test_the_pass_rate_filter_keeps_tasks_of_medium_difficulty(right: int, kept: bool) -> None:
    made = group("g", [1], [[2]] * 5, [1.0] * right + [0.0] * (5 - right))
    assert PassRate()(made) is (made if kept else None)


def test_the_pass_rate_filter_goes_by_the_score_correct_where_there_is_one() -> None:
    made = group("g", [1], [[2], [3]], [0.0, 1.0])
    made.episodes[0].scores["correct"] = 1.0
    assert PassRate()(made) is None
    assert PassRate(low=1.0, high=1.0)(made) is made
    assert PassRate(threshold=1.0, low=0.0, high=0.0)(made) is made


def test_the_bounds_of_the_pass_rate_filter_are_in_order() -> None:
    with pytest.raises(SettingsError, match="low must not exceed high"):
        PassRate(low=0.8, high=0.2)


@pytest.mark.parametrize(
    ("kind", "settings", "refused"),
    [
        (PassRate, {"low": -0.1}, "low: expected at least 0 and"),
        (PassRate, {"low": 1.5, "high": 1.5}, "low: expected at least 0 and"),
        (PassRate, {"high": 1.1}, "high: expected at least 0 and"),
        (PassRate, {"low": -0.1, "high": -0.1}, "high: expected at least 0 and"),
        (OverlongShaping, {"limit": 0, "buffer": 2}, "limit: expected greater than 0"),
        (OverlongShaping, {"limit": 4, "buffer": 0}, "buffer: expected greater than 0"),
        (OverlongShaping, {"limit": 4, "buffer": 2, "penalty": -1.0}, "penalty: expected at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(kind: type[Filter], settings: dict[str, Any], refused: str) -> None:
    with pytest.raises(SettingsError, match=refused):
        kind(**settings)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    made = group("g", [1], [[2], [3, 4]], [0.0, 1.0])
    assert PassRate(low=0.0, high=1.0)(made) is made
    shaped = OverlongShaping(limit=1, buffer=1)(made)
    assert shaped is not None
    assert [episode.reward for episode in shaped.episodes] == [-1.0, 0.0]
    unshaped = OverlongShaping(limit=1, buffer=1, penalty=0.0)(made)
    assert unshaped is not None
    assert [episode.reward for episode in unshaped.episodes] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("chosen", "name"), [(OverlongShaping(limit=2, buffer=1), "overlong_shaping"), (BestAndWorst(), "best_and_worst")]
)
def test_a_filter_of_one_reward_refuses_rewards_by_role(chosen: Filter, name: str) -> None:
    made = group("g", [1], [[2], [3]], [0.0, 1.0])
    made.episodes[1].rewards = {"first": 1.0, "second": 1.0}
    with pytest.raises(ConfigError, match=rf"^algorithm\.filters: {name} reads one reward of an episode, but g has"):
        chosen(made)
