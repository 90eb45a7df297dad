"""Advantage estimators against slow oracles, and their invariants for any rewards."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.groups import episode
from tests.losses.batches import fill, random_groups, refilled, without
from tests.reference import advantages as slow
from tests.reference.plain import Plain, PlainOutput, plain
from tests.reference.policy import kl as slow_kl
from whet.algorithms.advantage import Advantage, Credit
from whet.algorithms.distillation import TeacherAdvantage
from whet.algorithms.gdpo import GDPOAdvantage
from whet.algorithms.grpo import GroupAdvantage
from whet.algorithms.max_rl import MaxRLAdvantage
from whet.algorithms.ppo import GAE
from whet.algorithms.prime import ProcessRewards
from whet.algorithms.registry import ADVANTAGES
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlusAdvantage
from whet.algorithms.token_selection import M2PO, ClipCov, KLCov
from whet.algorithms.turns import TurnAdvantage
from whet.base.errors import DataError
from whet.config import Component, SettingsError
from whet.core.batch import Batch
from whet.core.types import Group, Span, Task
from whet.losses.kl import KL

SEEDS = (0, 1, 2, 3)
OLD = ("values", "old_logprobs", "reference_logprobs")
FILLED = (*OLD, "rollout_logprobs", "reward_logprobs", "reward_reference_logprobs", "teacher_token_logprobs")
COMPONENTS = {"correct": 1.0, "format": 0.25, "constant": 2.0}


def penalty(b: Plain, **settings: Any) -> list[float]:
    old = PlainOutput(b.old_logprobs, None, None, None)
    return slow_kl(b, old, old, **settings)


ESTIMATORS: list[tuple[Any, Any]] = [
    (GroupAdvantage(), slow.group),
    (GroupAdvantage(std="population", eps=0.1), lambda b: slow.group(b, std="population", eps=0.1)),
    (GroupAdvantage(divide_by_std=False), lambda b: slow.group(b, divide=False)),
    (GroupAdvantage(baseline="leave_one_out"), lambda b: slow.group(b, "leave_one_out")),
    (
        GroupAdvantage(baseline="leave_one_out", divide_by_std=False),
        lambda b: slow.group(b, "leave_one_out", divide=False),
    ),
    (ReinforcePlusPlusAdvantage(), slow.reinforce_plus_plus),
    (
        ReinforcePlusPlusAdvantage(group_baseline=True, std="population", eps=0.1),
        lambda b: slow.reinforce_plus_plus(b, True, std="population", eps=0.1),
    ),
    (
        ReinforcePlusPlusAdvantage(kl=KL(coefficient=0.3, estimator="k1")),
        lambda b: slow.reinforce_plus_plus(b, penalty=penalty(b, coefficient=0.3, estimator="k1")),
    ),
    (GDPOAdvantage(components=COMPONENTS), lambda b: slow.gdpo(b, COMPONENTS)),
    (
        GDPOAdvantage(components={"correct": 0.5, "format": -1.0}, std="population", eps=0.1),
        lambda b: slow.gdpo(b, {"correct": 0.5, "format": -1.0}, "population", 0.1),
    ),
    (TeacherAdvantage(), slow.teacher),
    (TeacherAdvantage(weight=0.3, clamp=0.2), lambda b: slow.teacher(b, 0.3, 0.2)),
    (
        TeacherAdvantage.model_validate({"weight": 2.0, "reward": {"type": "group", "std": "population"}}),
        lambda b: slow.teacher(b, 2.0, reward=slow.group(b, std="population")),
    ),
    (GAE(), slow.gae),
    (GAE(gamma=0.9, policy_lambda=0.7), lambda b: slow.gae(b, 0.9, 0.7)),
    (GAE(gamma=0.9, critic_lambda=1.0), lambda b: slow.gae(b, 0.9, critic_lam=1.0)),
    (
        GAE(gamma=0.9, critic_lambda=0.5, length_adaptive=0.4),
        lambda b: slow.gae(b, 0.9, critic_lam=0.5, alpha=0.4),
    ),
    (GAE(length_adaptive=0.4), lambda b: slow.gae(b, alpha=0.4)),
    (GAE(gamma=0.9, bootstrap_truncated=True), lambda b: slow.gae(b, 0.9, bootstrap=True)),
    (GAE(whiten=True, eps=0.1), lambda b: slow.gae(b, whiten=True, eps=0.1)),
    (GAE(whiten=True, std="population"), lambda b: slow.gae(b, whiten=True, std="population")),
    (GAE(kl=KL(coefficient=0.3)), lambda b: slow.gae(b, penalty=penalty(b, coefficient=0.3))),
    (TurnAdvantage(), slow.turns),
    (TurnAdvantage(gamma=0.7, divide_by_std=False), lambda b: slow.turns(b, 0.7, False)),
    (ClipCov(low=0.1, high=0.6, share=1.0), lambda b: slow.clip_cov(b, slow.group(b), 0.1, 0.6)),
    (ClipCov(of=GroupAdvantage(eps=0.1), share=1.0), lambda b: slow.clip_cov(b, slow.group(b, eps=0.1))),
    (KLCov(of=GAE()), slow.gae),
    (M2PO(), lambda b: slow.m2po(b, slow.group(b))),
    (M2PO(threshold=0.003), lambda b: slow.m2po(b, slow.group(b), 0.003)),
    (M2PO(of=GAE(), threshold=0.001), lambda b: (slow.m2po(b, slow.gae(b)[0], 0.001), slow.gae(b)[1])),
    (ProcessRewards(), slow.process_rewards),
    (ProcessRewards(beta=0.7, gamma=0.8), lambda b: slow.process_rewards(b, 0.7, 0.8)),
]
every_estimator = pytest.mark.parametrize("estimator", [e for e, _ in ESTIMATORS], ids=repr)


def make(seed: int) -> Batch:
    return fill(random_groups(seed), seed)[0]


def group_of(rewards: list[float], uid: str = "g", length: int = 2) -> Group:
    rows = [episode([Span([1, 2], False), Span([3 + i] * length, True)], r) for i, r in enumerate(rewards)]
    return Group(uid, Task(uid, []), rows)


def per_row(batch: Batch, column: torch.Tensor) -> list[float]:
    return [column[row.tokens[0]].item() for row in plain(batch).rows if row.tokens]


@pytest.mark.parametrize(("estimator", "oracle"), ESTIMATORS, ids=[repr(e) for e, _ in ESTIMATORS])
@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_are_what_the_oracle_says(estimator: Any, oracle: Any, seed: int) -> None:
    batch = make(seed)
    credit = estimator(batch)
    expected = oracle(plain(batch))
    advantages, returns = expected if isinstance(expected, tuple) else (expected, None)
    assert credit.advantages.dtype == torch.float64
    assert credit.advantages.tolist() == pytest.approx(advantages, rel=1e-10, abs=1e-10)
    if returns is None:
        assert credit.returns is None
    else:
        assert credit.returns.tolist() == pytest.approx(returns, rel=1e-10, abs=1e-10)


@every_estimator
def test_untrained_tokens_receive_exactly_nothing(estimator: Any) -> None:
    batch = make(0)
    credit = estimator(batch)
    assert (credit.advantages[~batch.trained] == 0).all()
    assert credit.returns is None or (credit.returns[~batch.trained] == 0).all()


@every_estimator
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_its_group(estimator: Any, bad: float) -> None:
    if isinstance(estimator, TeacherAdvantage) and estimator.reward is None:
        estimator = TeacherAdvantage(reward=GroupAdvantage())  # rewards are not read otherwise
    batch = make(0)
    batch.reward[2] = bad
    for scores in batch.scores.values():
        scores[2] = bad
    with pytest.raises(DataError, match=r"'task-0': the reward (component '\w+' )?is .*\(1 such"):
        estimator(batch)


def test_estimators_fill_the_advantages_and_say_which_settings_change_nothing() -> None:
    assert GroupAdvantage().fills == GDPOAdvantage(components={"correct": 1.0}).fills == {"advantages"}
    assert TeacherAdvantage().fills == {"advantages"}
    assert GAE().fills == TeacherAdvantage(reward=GAE()).fills == {"advantages", "returns"}
    spread: dict[str, Any] = {"std": "population", "eps": 0.1}
    for estimator, flag in ((GroupAdvantage, "divide_by_std"), (TurnAdvantage, "divide_by_std"), (GAE, "whiten")):
        assert list(estimator(**{flag: False}, **spread).idle()) == [(name, f"{flag} = true") for name in spread]
        assert list(estimator(**{flag: True}, **spread).idle()) == []
    with pytest.raises(SettingsError, match="gamma"):
        TurnAdvantage(gamma=1.5)
    assert TurnAdvantage() == TurnAdvantage(gamma=1.0, divide_by_std=True, std="sample", eps=1e-6)
    adaptive = GAE(policy_lambda=0.5, length_adaptive=0.1)
    assert list(adaptive.idle()) == [("policy_lambda", "length_adaptive is not set")]


@pytest.mark.parametrize(
    ("estimated", "said"),
    [
        (None, "must return Credit.*, not None$"),
        (0.5, "must return Credit.*, not a float$"),
        (Credit(torch.zeros(1)), "Given.estimate.*advantages"),
    ],
)
def test_an_estimate_that_is_not_one_number_for_each_token_or_sequence_is_refused(estimated: Any, said: str) -> None:
    class Given(Advantage):
        def estimate(self, batch: Batch) -> Credit:
            return estimated  # type: ignore[no-any-return]

    with pytest.raises(DataError, match=said):
        Given().credit(make(0))


def test_only_a_baseline_of_the_group_compares_answers() -> None:
    compare = [
        GroupAdvantage(),
        GDPOAdvantage(components={"correct": 1.0}),
        MaxRLAdvantage(),
        TurnAdvantage(),
        ProcessRewards(),
        ReinforcePlusPlusAdvantage(group_baseline=True),
        M2PO(),
        TeacherAdvantage(reward=GroupAdvantage()),
    ]
    alone = [ReinforcePlusPlusAdvantage(group_baseline=False), GAE(), KLCov(of=GAE()), TeacherAdvantage()]
    assert [estimator for estimator in (*compare, *alone) if estimator.compares] == compare


@every_estimator
def test_a_step_of_nothing_has_no_credit(estimator: Any) -> None:
    nothing, _ = make(0).select(torch.tensor([], dtype=torch.long))
    assert estimator(nothing).advantages.numel() == 0


@every_estimator
def test_a_step_without_trained_tokens_has_no_credit(estimator: Any) -> None:
    batch = make(0)
    batch = replace(batch, trained=torch.zeros_like(batch.trained))
    assert not estimator(batch).advantages.any()


@every_estimator
def test_order_of_groups_does_not_matter(estimator: Any) -> None:
    groups = random_groups(1)
    forward, backward = (fill(gs, 7)[0] for gs in (groups, groups[::-1]))
    # Both batches have the same random columns; each sequence's are moved with it.
    place = {}
    for row in plain(backward).rows:
        place.setdefault(backward.group_uids[row.group], []).append(row.tokens)
    matched: dict[int, int] = {}
    seen: dict[str, int] = {}
    for row in plain(forward).rows:
        uid = forward.group_uids[row.group]
        tokens = place[uid][seen.get(uid, 0)]
        seen[uid] = seen.get(uid, 0) + 1
        matched |= dict(zip(row.tokens, tokens, strict=True))
    for name in FILLED:
        column = backward.column(name)
        for here, there in matched.items():
            column[there] = forward.column(name)[here]
    one, two = estimator(forward).advantages, estimator(backward).advantages
    assert [one[t].item() for t in matched] == pytest.approx([two[t].item() for t in matched.values()], abs=1e-10)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9 + 0.1, -7.7, 0.0])
@pytest.mark.parametrize(
    "estimator",
    [
        GroupAdvantage(),
        GroupAdvantage(eps=0.0),
        GroupAdvantage(baseline="leave_one_out", eps=0.0),
        GroupAdvantage(baseline="leave_one_out", divide_by_std=False),
        ReinforcePlusPlusAdvantage(eps=0.0),
        ReinforcePlusPlusAdvantage(group_baseline=True, eps=0.0),
        TurnAdvantage(eps=0.0),
        TurnAdvantage(divide_by_std=False),
    ],
    ids=repr,
)
def test_equal_rewards_give_exactly_zero_whatever_their_mean_rounds_to(estimator: Any, reward: float) -> None:
    batch = Batch.from_groups([group_of([reward] * 7), group_of([reward] * 3, "h")])
    assert (estimator(batch).advantages == 0).all()


def test_equal_components_give_exactly_zero() -> None:
    batch = Batch.from_groups([group_of([1.0] * 7)])
    batch.scores = {"a": torch.full((7,), 0.1).double()}
    assert (GDPOAdvantage(components={"a": 1.0}, eps=0.0)(batch).advantages == 0).all()


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("std", ["sample", "population"])
def test_a_group_of_one_has_no_advantage(baseline: Any, std: Any) -> None:
    batch = Batch.from_groups([group_of([5.0]), group_of([0.0, 1.0], "h")])
    advantages = per_row(batch, GroupAdvantage(baseline=baseline, std=std)(batch).advantages)
    assert advantages[0] == 0.0
    assert advantages[1] == -advantages[2] < 0


@pytest.mark.parametrize(
    "estimator",
    [
        GAE(gamma=0.9),
        GAE(kl=KL(coefficient=0.3)),
        ReinforcePlusPlusAdvantage(kl=KL(coefficient=0.3)),
        TeacherAdvantage(weight=0.3),
        ProcessRewards(),
    ],
    ids=repr,
)
def test_columns_in_float32_are_computed_with_in_float64(estimator: Any) -> None:
    batch = make(1)
    single = refilled(batch, **{name: batch.column(name).float() for name in FILLED})
    double = refilled(single, **{name: single.column(name).double() for name in FILLED})
    one, two = estimator(single).advantages.tolist(), estimator(double).advantages.tolist()
    assert one == pytest.approx(two, rel=1e-13, abs=1e-13)


def test_known_numbers() -> None:
    batch = Batch.from_groups([group_of([1.0, 0.0, 0.0, 0.0])])

    def of(**settings: Any) -> list[float]:
        return per_row(batch, GroupAdvantage(eps=0.0, **settings)(batch).advantages)

    assert of() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert of(std="population") == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])
    assert of(divide_by_std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert of(divide_by_std=False, baseline="leave_one_out") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_a_tiny_spread_on_a_large_reward_is_still_seen() -> None:
    batch = Batch.from_groups([group_of([1e6, 1e6 + 1e-3])])
    assert per_row(batch, GroupAdvantage(eps=0.0)(batch).advantages) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_rewards_may_be_shifted_and_scaled() -> None:
    one = Batch.from_groups([group_of([0.0, 1.0, 3.0])])
    two = Batch.from_groups([group_of([10.0, 12.0, 16.0])])
    estimator = GroupAdvantage(eps=0.0)
    torch.testing.assert_close(estimator(one).advantages, estimator(two).advantages)


def test_two_groups_with_the_same_prompt_keep_their_own_baselines() -> None:
    batch = Batch.from_groups([group_of([0.0, 1.0], "a"), group_of([5.0, 9.0], "b")])
    assert per_row(batch, GroupAdvantage(divide_by_std=False)(batch).advantages) == [-0.5, 0.5, -2.0, 2.0]


def test_an_untrained_answer_counts_in_its_groups_baseline() -> None:
    group = group_of([0.0, 1.0, 5.0])
    group.trajectories[2].spans[1].trained = False
    batch = Batch.from_groups([group])
    assert per_row(batch, GroupAdvantage(divide_by_std=False)(batch).advantages) == [-2.0, -1.0]


def test_a_missing_component_is_named() -> None:
    with pytest.raises(DataError, match=r"'colour'.*correct, format, constant"):
        GDPOAdvantage(components={"correct": 1.0, "colour": 1.0})(make(0))
    with pytest.raises(DataError, match=r"scores are: none$"):
        GDPOAdvantage(components={"colour": 1.0})(Batch.from_groups([group_of([1.0])]))


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    batch = make(2)
    credit = GAE(policy_lambda=1.0)(batch)
    returns = batch.per_token(batch.reward)
    torch.testing.assert_close(credit.returns, returns)
    torch.testing.assert_close(credit.advantages, torch.where(batch.trained, returns - batch.values, 0.0))


def test_gae_of_a_truncated_episode_only_bootstraps_when_asked() -> None:
    batch = Batch.from_groups([group_of([0.0], length=1), group_of([0.0], "h", length=1)])
    batch.values = torch.where(batch.trained, 2.0, math.nan).double()
    batch.truncated = torch.tensor([True, False])
    assert per_row(batch, GAE()(batch).advantages) == [-2.0, -2.0]
    assert per_row(batch, GAE(bootstrap_truncated=True)(batch).advantages) == [0.0, -2.0]


def test_length_adaptive_lambda_of_short_answers_is_zero_not_negative() -> None:
    batch = Batch.from_groups([group_of([1.0], length=4)])
    batch.values = torch.zeros(len(batch)).double()
    assert GAE(length_adaptive=0.05)(batch).advantages[batch.trained].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_needs_follow_from_the_settings() -> None:
    penalised = KL(coefficient=0.1)
    assert (
        GroupAdvantage().reads
        == GDPOAdvantage(components={"a": 1.0}).reads
        == ReinforcePlusPlusAdvantage().reads
        == frozenset()
    )
    assert ReinforcePlusPlusAdvantage(kl=penalised).reads == {"old_logprobs", "reference_logprobs"}
    assert GAE().reads == {"values"}
    asked = {"teacher_token_logprobs", "old_logprobs"}
    assert TeacherAdvantage().reads == asked
    assert TeacherAdvantage(reward=GAE()).reads == asked | {"values"}
    assert GAE(kl=penalised).reads == {"values", "old_logprobs", "reference_logprobs"}


@pytest.mark.parametrize(
    ("estimator", "column"),
    [
        (GAE(), "values"),
        (GAE(kl=KL()), "old_logprobs"),
        (ReinforcePlusPlusAdvantage(kl=KL()), "reference_logprobs"),
        (TeacherAdvantage(), "teacher_token_logprobs"),
        (TeacherAdvantage(), "old_logprobs"),
    ],
    ids=repr,
)
def test_a_column_that_nobody_filled_is_named(estimator: Any, column: str) -> None:
    with pytest.raises(DataError, match=f"'{column}'"):
        estimator(without(make(0), column))


def test_the_returns_of_the_reward_stay_what_they_are() -> None:
    batch = make(0)
    mixed = TeacherAdvantage(reward=GAE())(batch)
    assert mixed.returns is not None
    assert torch.equal(mixed.returns, GAE()(batch).returns)
    assert TeacherAdvantage()(batch).returns is None


def test_defaults() -> None:
    assert MaxRLAdvantage() == MaxRLAdvantage(eps=1e-6)
    assert ClipCov() == ClipCov(of=GroupAdvantage(), share=2e-4, low=1.0, high=5.0, seed=0)
    assert KLCov() == KLCov(of=GroupAdvantage(), share=2e-4)
    assert M2PO() == M2PO(of=GroupAdvantage(), threshold=0.04)
    assert TeacherAdvantage() == TeacherAdvantage(weight=1.0, clamp=10.0, reward=None)
    assert GroupAdvantage() == GroupAdvantage(baseline="group_mean", divide_by_std=True, std="sample", eps=1e-6)
    assert ReinforcePlusPlusAdvantage() == ReinforcePlusPlusAdvantage(
        group_baseline=False, kl=None, std="sample", eps=1e-6
    )
    assert GDPOAdvantage(components={"a": 1.0}) == GDPOAdvantage(components={"a": 1.0}, std="sample", eps=1e-6)
    assert GAE() == GAE(
        gamma=1.0,
        policy_lambda=0.95,
        critic_lambda=None,
        length_adaptive=None,
        bootstrap_truncated=False,
        whiten=False,
        kl=None,
        std="sample",
        eps=1e-6,
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GroupAdvantage, {"eps": -1e-9}),
        (GroupAdvantage, {"baseline": "median"}),
        (ReinforcePlusPlusAdvantage, {"eps": -1e-9}),
        (GDPOAdvantage, {"components": {"a": 1.0}, "eps": -1e-9}),
        (TeacherAdvantage, {"weight": 0.0}),
        (TeacherAdvantage, {"clamp": 0.0}),
        (MaxRLAdvantage, {"eps": -1e-9}),
        (ClipCov, {"share": 0.0}),
        (ClipCov, {"share": 1.1}),
        (KLCov, {"share": 0.0}),
        (KLCov, {"share": 1.1}),
        (M2PO, {"threshold": 0.0}),
        (GAE, {"eps": -1e-9}),
        (GAE, {"gamma": 1.01}),
        (GAE, {"gamma": -0.01}),
        (GAE, {"policy_lambda": 1.01}),
        (GAE, {"policy_lambda": -0.01}),
        (GAE, {"critic_lambda": 1.01}),
        (GAE, {"critic_lambda": -0.01}),
        (GAE, {"length_adaptive": 0.0}),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        kind(**settings)


def test_settings_at_the_edge_of_their_range_are_allowed() -> None:
    assert TeacherAdvantage(weight=0.5, clamp=0.5).weight == 0.5
    edges = GAE(gamma=0.0, policy_lambda=0.0, critic_lambda=0.0, eps=0.0, length_adaptive=0.01)
    assert (edges.gamma, edges.policy_lambda, edges.critic_lambda) == (0.0, 0.0, 0.0)
    assert GAE(gamma=1.0, policy_lambda=1.0, critic_lambda=1.0).critic_lambda == 1.0
    for exact in (GDPOAdvantage(components={"a": 1.0}, eps=0.0), GroupAdvantage(eps=0.0)):
        assert exact.eps == ReinforcePlusPlusAdvantage(eps=0.0).eps == 0.0


def test_registered_names_lead_to_their_classes() -> None:
    assert {name: Component(ADVANTAGES).resolve(name)[0] for name in ADVANTAGES} == {
        "group": GroupAdvantage,
        "reinforce_plus_plus": ReinforcePlusPlusAdvantage,
        "gdpo": GDPOAdvantage,
        "gae": GAE,
        "teacher": TeacherAdvantage,
        "process_rewards": ProcessRewards,
        "turn": TurnAdvantage,
        "max_rl": MaxRLAdvantage,
        "clip_cov": ClipCov,
        "kl_cov": KLCov,
        "m2po": M2PO,
    }
