"""Episodes of several branches and turns: an episode is one answer, however many sequences and rewards it has."""

import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.groups import episode
from whet.algorithms.gdpo import GDPOAdvantage
from whet.algorithms.grpo import GroupAdvantage
from whet.algorithms.ppo import GAE
from whet.algorithms.prime import ProcessRewards
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlusAdvantage
from whet.algorithms.turns import TurnAdvantage
from whet.core.batch import Batch
from whet.core.types import Episode, Group, Span, Status, Task, Trajectory


def reply(tokens: int, reward: float = 0.0) -> Span:
    return Span([5] * tokens, True, [-1.0] * tokens, (0, 0), reward)


def made(seed: int) -> list[Group]:
    """Groups of episodes of one to three branches, each of one to three replies that may earn something."""
    dice = random.Random(seed)
    groups = []
    for number, size in enumerate((3, 1, 4)):
        episodes = []
        for _ in range(size):
            branches = []
            for _ in range(dice.choice([1, 1, 2, 3])):
                spans = [Span([number + 1] * 3, False)]
                for _ in range(dice.randint(1, 3)):
                    spans += [
                        reply(dice.randint(1, 3), dice.choice([0.0, 1.0, -0.5])),
                        Span([9, dice.randrange(9)], False),
                    ]
                branches.append(Trajectory(spans))
            score = {"correct": dice.random()}
            episodes.append(Episode(branches, reward=dice.uniform(-1, 2), scores=score))
        groups.append(Group(f"g{number}", Task(f"g{number}", []), episodes))
    return groups


def per_branch(batch: Batch, column: torch.Tensor) -> list[list[float]]:
    return [[column[i].item() for i in path.tolist() if batch.trained[i]] for path in batch.paths()]


@pytest.mark.parametrize("seed", range(8))
def test_baselines_count_episodes_and_branches_share_what_comes_out(seed: int) -> None:
    groups = made(seed)
    batch = Batch.from_groups(groups)
    for estimator, value in (
        (GroupAdvantage(divide_by_std=False), lambda e: e.reward),
        (GroupAdvantage(baseline="leave_one_out", divide_by_std=False), lambda e: e.reward),
    ):
        got = iter(per_branch(batch, estimator(batch).advantages))
        for group in groups:
            values = [value(e) for e in group.episodes]
            for i, one in enumerate(group.episodes):
                others = values if estimator.baseline == "group_mean" else values[:i] + values[i + 1 :] or values
                expected = values[i] - math.fsum(others) / len(others)
                for branch in one.branches:
                    assert next(got) == pytest.approx([expected] * branch.trained_tokens, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_a_second_branch_changes_nobody_elses_advantage(seed: int) -> None:
    groups = made(seed)
    single = [Group(g.uid, g.task, [Episode(e.branches[:1], e.reward, e.scores) for e in g.episodes]) for g in groups]
    firsts = [len(e.branches) for g in groups for e in g.episodes]
    places = [sum(firsts[:i]) for i in range(len(firsts))]
    for estimator in (GroupAdvantage(), GDPOAdvantage(components={"correct": 1.0})):
        whole, alone = Batch.from_groups(groups), Batch.from_groups(single)
        several = per_branch(whole, estimator(whole).advantages)
        for place, expected in zip(places, per_branch(alone, estimator(alone).advantages), strict=True):
            assert several[place] == expected


@pytest.mark.parametrize("seed", range(4))
def test_weights_count_episodes(seed: int) -> None:
    groups = made(seed)
    batch = Batch.from_groups(groups).weigh("sequence")
    assert batch.weight is not None
    weights = iter(per_branch(batch, batch.weight))
    count = sum(len(group.episodes) for group in groups)
    for one in (e for group in groups for e in group.episodes):
        for branch in one.branches:
            assert next(weights) == pytest.approx([1 / count / one.trained_tokens] * branch.trained_tokens)
    assert batch.weight.sum().item() == pytest.approx(1.0)
    constant = Batch.from_groups(groups).weigh("constant", 10).weight
    assert constant is not None
    assert constant[batch.trained].tolist() == pytest.approx([1 / count / 10] * int(batch.trained.sum()))


def turns_of(branch: Trajectory) -> list[Span]:
    return [span for span in branch.spans if span.trained]


def earned(one: Episode, branch: Trajectory) -> list[float]:
    """Return what each reply of a branch earned; the last one also gets the part of the reward that no reply earned."""
    rest = one.reward - math.fsum(span.reward for span in one.spans)
    rewards = [span.reward for span in turns_of(branch)]
    return [*rewards[:-1], rewards[-1] + rest]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("divide", [True, False])
def test_a_turn_is_compared_with_the_same_turn_of_the_others(seed: int, gamma: float, divide: bool) -> None:
    groups = made(seed)
    batch = Batch.from_groups(groups)
    got = iter(per_branch(batch, TurnAdvantage(gamma=gamma, divide_by_std=divide, eps=0.1)(batch).advantages))
    for group in groups:
        to_go: dict[int, list[float]] = defaultdict(list)
        for one in group.episodes:
            for branch in one.branches:
                rewards = earned(one, branch)
                for k in range(len(rewards)):
                    to_go[k].append(math.fsum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))))
        for one in group.episodes:
            for branch in one.branches:
                expected = []
                for k, span in enumerate(turns_of(branch)):
                    values, own = to_go[k], to_go[k].pop(0)
                    to_go[k].append(own)  # the order of branches comes round again
                    mean = math.fsum(values) / len(values)
                    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))
                    value = (own - mean) / (spread + 0.1 if divide else 1.0)
                    expected += [value] * len(span.tokens)
                assert next(got) == pytest.approx(expected, abs=1e-9)


def test_turn_advantages_of_single_replies_are_those_of_groups() -> None:
    rewards = [0.3, 1.0, -2.0, 0.3]
    rows = [episode([Span([1], False), reply(2 + i)], value) for i, value in enumerate(rewards)]
    batch = Batch.from_groups([Group("g", Task("g", []), rows)])
    expected = GroupAdvantage()(batch).advantages
    assert TurnAdvantage()(batch).advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_gae_gives_each_reply_what_it_earned_at_its_last_token(seed: int) -> None:
    groups = made(seed)
    batch = Batch.from_groups(groups)
    batch.values = torch.randn(len(batch), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    got = iter(per_branch(batch, GAE(gamma=0.9, policy_lambda=0.7)(batch).advantages))
    values = iter(per_branch(batch, batch.values))
    for one in (e for group in groups for e in group.episodes):
        for branch in one.branches:
            steps = [
                reward if last else 0.0
                for span, reward in zip(turns_of(branch), earned(one, branch), strict=True)
                for last in [False] * (len(span.tokens) - 1) + [True]
            ]
            known = next(values)
            expected, running = [0.0] * len(steps), 0.0
            for t in reversed(range(len(steps))):
                following = known[t + 1] if t + 1 < len(steps) else 0.0
                running = steps[t] + 0.9 * following - known[t] + 0.9 * 0.7 * running
                expected[t] = running
            assert next(got) == pytest.approx(expected, abs=1e-9)


def test_the_reward_of_a_single_reply_is_no_column() -> None:
    one = Episode([Trajectory([Span([1], False), reply(2, 1.0)])], reward=1.0)
    assert Batch.from_groups([Group("g", Task("g", []), [one])]).turn_rewards is None


def cut(reward: float = 0.0) -> Episode:
    """Return an episode whose time ran out before its first reply."""
    return Episode([], reward=reward, status=Status.TRUNCATED, limit="seconds")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_an_episode_cut_before_its_first_reply_counts_as_one_whose_reply_trains_nothing(data: st.DataObject) -> None:
    groups, masked = [], []
    for number in range(data.draw(st.integers(1, 3))):
        rewards = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, -1.0]), min_size=1, max_size=6))
        which = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
        spans = [[Span([number + 1] * 3, False), reply(data.draw(st.integers(1, 3)))] for _ in rewards]
        score = [{} if gone else {"correct": reward} for reward, gone in zip(rewards, which, strict=True)]
        rows = [
            cut(reward) if gone else Episode([Trajectory(own)], reward, scores)
            for reward, gone, own, scores in zip(rewards, which, spans, score, strict=True)
        ]
        other = [
            replace(row, branches=[Trajectory([own[0], replace(own[1], trained=False)])]) if not row.branches else row
            for row, own in zip(rows, spans, strict=True)
        ]
        groups.append(Group(f"g{number}", Task("t", []), rows))
        masked.append(Group(f"g{number}", Task("t", []), other))
    ours, theirs = (Batch.from_groups(several, share_prompts=data.draw(st.booleans())) for several in (groups, masked))
    for estimator in (
        GroupAdvantage(),
        GroupAdvantage(baseline="leave_one_out", std="population"),
        ReinforcePlusPlusAdvantage(group_baseline=True),
        GDPOAdvantage(components={"correct": 1.0}),
        TurnAdvantage(),
        ProcessRewards(),
    ):
        for batch in (ours, theirs):
            for column in estimator.reads:
                batch.fill(column, torch.zeros(len(batch)))
        assert per_branch(ours, estimator(ours).advantages) == per_branch(theirs, estimator(theirs).advantages)
    for weighting in ("token", "sequence", "group", "constant"):
        weights = [batch.weigh(weighting, 10) for batch in (ours, theirs)]
        assert per_branch(weights[0], weights[0].column("weight")) == per_branch(
            weights[1], weights[1].column("weight")
        )


def test_two_zeros_that_were_cut_before_their_first_reply_lift_the_two_right_answers() -> None:
    right = [Episode([Trajectory([Span([1], False), reply(2)])], reward=1.0) for _ in range(2)]
    batch = Batch.from_groups([Group("g", Task("g", []), [*right, cut(), cut()])])
    assert batch.sequences == 4
    advantages = per_branch(batch, GroupAdvantage(eps=0.0)(batch).advantages)
    assert advantages == [pytest.approx([math.sqrt(3) / 2] * 2)] * 2 + [[], []]


def test_a_branch_counts_on_from_the_replies_that_it_inherits() -> None:
    prompt, first, second = Span([1], False), reply(2, 1.0), reply(3, 0.5)
    context = [prompt, replace(first, trained=False, reward=0.0), Span([9], False)]
    one = Episode([Trajectory([prompt, first]), Trajectory([*context, second])], reward=1.5)
    other = Episode([Trajectory([prompt, reply(2, 0.0), Span([8], False), reply(1, 0.0)])], reward=0.0)
    batch = Batch.from_groups([Group("g", Task("g", []), [one, other])])
    got = per_branch(batch, TurnAdvantage(divide_by_std=False)(batch).advantages)
    assert got == [[0.5, 0.5], [0.25] * 3, [-0.5, -0.5, -0.25]], "second replies are compared with second ones"
