"""Episodes of several roles: each role has a session, a reward and a baseline."""

import asyncio
import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.groups import groups
from tests.tiny import tiny_tokenizer
from tests.toy import Lowercase, read_settings, toy_settings
from whet.algorithms.grpo import GroupAdvantage
from whet.algorithms.max_rl import MaxRLAdvantage
from whet.algorithms.turns import TurnAdvantage
from whet.base.errors import ConfigError, DataError, GeneratorError
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.types import Episode, Group, Message, Span, Status, Task, Trajectory
from whet.engines.base import Completion, SamplingParams
from whet.metrics import Metrics
from whet.metrics.clock import Timing
from whet.metrics.rollout_file import read_rollouts
from whet.rollouts.audit import audit
from whet.rollouts.episode import play, run_episode
from whet.rollouts.failures import Failures
from whet.rollouts.filters import BestAndWorst, DynamicSampling, OverlongShaping
from whet.rollouts.group_metrics import count_group
from whet.rollouts.group_player import score_group
from whet.rollouts.rewards import Length, compose
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Player, Recording
from whet.rollouts.unheard import Unheard
from whet.run.run import resume, start
from whet.tasks.base import Environment, Environments, Observation, Step, TaskSet
from whet.tasks.preference.reward_model import RewardModelTasks
from whet.tasks.self_play import Nim, NimGame, legal_move
from whet.tasks.validate import validate, wrong
from whet.tasks.workers import WorkerTasks

RENDERER = Renderer(tiny_tokenizer())
SAMPLING = Sampling(max_prompt_tokens=400, max_new_tokens=8, max_turns=20)
ESTIMATORS = (
    GroupAdvantage(), GroupAdvantage(divide_by_std=False), GroupAdvantage(baseline="leave_one_out"), TurnAdvantage(),
)  # fmt: skip


def branch(role: str, tokens: int = 2) -> Trajectory:
    return Trajectory([Span([1], False), Span([5] * tokens, True, [-1.0] * tokens, (0, 0))], role=role)


def duel(uid: str, rewards: list[dict[str, float]]) -> Group:
    episodes = [
        Episode([branch(role, 1 + i) for i, role in enumerate(each)], statistics.fmean(each.values()), rewards=each)
        for each in rewards
    ]
    return Group(uid, Task(uid, []), episodes)


@given(groups())
def test_one_named_role_has_the_advantages_of_an_episode_without_roles(plain: list[Group]) -> None:
    def named(episode: Episode) -> Episode:
        branches = [replace(each, role="solver") for each in episode.branches]
        return replace(episode, branches=branches, rewards={"solver": episode.reward})

    kept = [replace(group, episodes=[e for e in group.episodes if e.branches]) for group in plain]
    kept = [group for group in kept if any(branch.tokens for e in group.episodes for branch in e.branches)]
    with_role = [replace(group, episodes=[named(episode) for episode in group.episodes]) for group in kept]
    one, other = Batch.from_groups(kept), Batch.from_groups(with_role)
    assert torch.equal(one.tokens, other.tokens)
    assert other.group_uids == tuple(f"{uid}#solver" for uid in one.group_uids)
    for estimator in ESTIMATORS:
        assert torch.equal(estimator.estimate(one).per_token(one), estimator.estimate(other).per_token(other))


_REWARDS = st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4)), min_size=2, max_size=5)


@given(st.lists(_REWARDS, min_size=1, max_size=3), st.floats(50, 100))
def test_the_rewards_of_one_role_never_move_the_advantages_of_another(drawn: Any, shift: float) -> None:
    def batch(shift: float) -> Batch:
        return Batch.from_groups(
            [duel(f"g{i}", [{"a": a, "b": b + shift} for a, b in each]) for i, each in enumerate(drawn)]
        )

    one, other = batch(0.0), batch(shift)
    of_first = one.per_token((torch.arange(one.sequences) % 2 == 0).double()).bool()
    for estimator in (*ESTIMATORS, MaxRLAdvantage()):
        ours, moved = estimator.estimate(one).per_token(one), estimator.estimate(other).per_token(other)
        assert torch.equal(ours[of_first], moved[of_first])


@pytest.mark.parametrize("seed", range(5))
def test_each_role_has_the_mean_and_the_deviation_of_that_role(seed: int) -> None:
    dice = random.Random(seed)
    rewards = [[{"a": dice.random(), "b": 10 * dice.random()} for _ in range(4)] for _ in range(3)]
    batch = Batch.from_groups([duel(f"g{i}", each) for i, each in enumerate(rewards)])
    got = GroupAdvantage().estimate(batch).per_token(batch)
    expected = []
    for group in rewards:
        columns = {role: [each[role] for each in group] for role in "ab"}
        for i in range(4):
            for values in columns.values():
                expected.append((values[i] - math.fsum(values) / 4) / (statistics.stdev(values) + 1e-6))
    firsts = [got[path[batch.trained[path]][0]].item() for path in batch.paths()]
    assert firsts == pytest.approx(expected, abs=1e-12)
    assert batch.group_uids == ("g0#a", "g0#b", "g1#a", "g1#b", "g2#a", "g2#b")


@given(
    st.lists(_REWARDS, min_size=1, max_size=3),
    st.lists(st.sampled_from(["a", "b", "ab", ""]), min_size=15, max_size=15),
)
def test_what_one_role_did_has_the_same_advantages_alone(drawn: Any, replied: list[str]) -> None:
    """To the bit, whichever roles never replied: separate policies learn from the same numbers as one for all."""
    whole = [duel(f"g{i}", [{"a": a, "b": b} for a, b in each]) for i, each in enumerate(drawn)]
    for who, episode in zip(replied, [each for group in whole for each in group.episodes], strict=False):
        episode.branches = [branch for branch in episode.branches if branch.role in who]
    for plays in ({"a"}, {"b"}, {"b", ""}):
        of_others = {uid for uid in ("a", "b", "") if uid not in plays}
        own = [part for group in whole if (part := group.of_roles(plays.__contains__)).episodes]
        assert [part.of_roles(plays.__contains__) for part in own] == own
        kept = [branch for group in whole for branch in group.trajectories if branch.role in plays]
        assert [id(branch) for part in own for branch in part.trajectories if branch.spans] == [
            id(branch) for branch in kept if branch.spans
        ]
        if not any(branch.spans for branch in kept):
            continue
        together, alone = Batch.from_groups(whole), Batch.from_groups(own)
        assert alone.group_uids == tuple(uid for uid in together.group_uids if uid.partition("#")[2] not in of_others)
        for estimator in (*ESTIMATORS, MaxRLAdvantage()):
            both = of_each_role(together, estimator.estimate(together).per_token(together))
            expected = [values for uid, values in both if uid.partition("#")[2] in plays]
            assert [values for _, values in of_each_role(alone, estimator.estimate(alone).per_token(alone))] == expected


def of_each_role(batch: Batch, values: torch.Tensor) -> list[tuple[str, list[float]]]:
    """The role's group of each sequence, and the values of its trained tokens."""
    return [
        (batch.group_uids[int(group)], values[path[batch.trained[path]]].tolist() if len(path) else [])
        for group, path in zip(batch.group, batch.paths(), strict=True)
    ]


def test_a_role_that_never_replied_counts_in_no_baseline() -> None:
    group = duel("g", [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}])
    group.episodes[0].branches.pop()
    batch = Batch.from_groups([group])
    got = GroupAdvantage(divide_by_std=False).estimate(batch).per_token(batch)
    firsts = [got[path[batch.trained[path]][0]].item() for path in batch.paths()]
    assert firsts == pytest.approx([1 / 3, -2 / 3, 0.5, 1 / 3, -0.5])


class Comparing(Nim):
    """Changes rewards once all episodes are there; ``sets`` names what."""

    sets: str = ""

    async def score_group(self, task: Task, group: Group) -> None:
        for episode in group.episodes:
            if self.sets == "reward":
                episode.reward += 1.0
            elif self.sets == "rewards":
                episode.rewards = {role: earned + 1.0 for role, earned in episode.rewards.items()}
            elif self.sets == "roles":
                episode.rewards = {}


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("workers", [False, True])
def test_a_group_may_change_the_rewards_of_roles_and_not_that_of_the_episode_alone(workers: bool) -> None:
    async def changed(sets: str) -> Group:
        group = duel("g", [{"first": 1.0, "second": 0.0}, {"first": 0.0, "second": 2.0}])
        tasks: TaskSet = Comparing(sets=sets)
        environments = (WorkerTasks(taskset=tasks, processes=1) if workers else tasks).open()
        try:
            await score_group(environments, group.task, group)
        finally:
            await environments.close()
        return group

    assert [(e.reward, e.rewards) for e in asyncio.run(changed("rewards")).episodes] == [
        (1.5, {"first": 2.0, "second": 1.0}),
        (2.0, {"first": 1.0, "second": 3.0}),
    ]
    assert [each.reward for each in asyncio.run(changed("")).episodes] == [0.5, 1.0]
    for sets in ("reward", "roles"):
        with pytest.raises(ConfigError, match=r"each role learns from a separate reward \(first, second\)"):
            asyncio.run(changed(sets))


@pytest.mark.parametrize(
    "around",
    [
        {"type": "genrm", "judge": {"url": "http://127.0.0.1:1/v1", "model": "j"}},
        {"type": "reward_model", "model": "./m"},
        {"type": "agent", "program": "tests.endpoint.programs:team"},
    ],
    ids=lambda each: each["type"],
)
def test_what_gives_an_episode_one_reward_is_refused_around_roles(around: dict[str, Any], tmp_path: Path) -> None:
    for nim in ({"type": "nim"}, {"type": "workers", "taskset": "nim"}):
        with pytest.raises(ConfigError, match=r"gives an episode one reward, but each role"):
            read_settings(toy_settings(tmp_path, data={**around, "taskset": nim}))
    read_settings(toy_settings(tmp_path, data={**around, "taskset": {"type": "nim", "opponent": "perfect"}}))


def test_a_reward_model_refuses_roles_that_the_task_set_does_not_name() -> None:
    class Quiet(Nim):
        @property
        def role_names(self) -> tuple[str, ...]:
            return ()

    environments = RewardModelTasks(taskset=Quiet(), model="m").open()
    with pytest.raises(ConfigError, match="this episode has roles"):
        asyncio.run(environments.make(Quiet().tasks("train")[0]).start())


def test_filters_and_metrics_look_at_each_role() -> None:
    zero_sum = duel("g", [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}])
    equal = duel("g", [{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}])
    assert DynamicSampling()(zero_sum) is zero_sum
    assert DynamicSampling()(equal) is None
    one_differs = duel("g", [{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0}])
    assert DynamicSampling()(one_differs) is one_differs
    metrics = Metrics()
    count_group(metrics, zero_sum, "", 0)
    values = metrics.result()
    assert (values["reward/std"], values["role/a/reward"], values["role/b/reward"]) == (0.5, 0.5, 0.5)
    for single in (BestAndWorst(), OverlongShaping(limit=9, buffer=2)):
        with pytest.raises(ConfigError, match="rewards by role"):
            single(zero_sum)
    with pytest.raises(ConfigError, match="rewards by role"):
        compose(Length(free=1, limit=2), zero_sum.episodes[0])


class Says:
    """An engine that gives prepared replies, or what a function of the prompt says."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        return said(self.texts.pop(0))


def said(text: str) -> Completion:
    tokens = [*RENDERER.encode_text(text), RENDERER.stop_token_ids[0]]
    return Completion(tokens, [0.0] * len(tokens), (0, 0), "stop")


def played(environment: Environment, generator: Any, seed: int = 0, second: Any = None) -> Episode:
    """``second`` plays the role of this name, if it is given."""
    cast = {} if second is None else {"second": Player(second, RENDERER)}
    return asyncio.run(run_episode(environment, Recording(generator, RENDERER, SAMPLING, "e", seed, cast=cast)))


def self_play(stones: int) -> NimGame:
    return NimGame(Nim(stones=7).tasks("train")[stones - 1])


def test_a_game_has_a_conversation_and_a_reward_for_each_seat() -> None:
    episode = played(self_play(5), Says("1", "3", "1"))
    assert [each.role for each in episode.branches] == ["first", "second"]
    assert episode.rewards == {"first": 1.0, "second": 0.0}
    first, second = (branch.messages for branch in episode.branches)
    assert [message["content"] for message in first[1:]] == ["1", "The other player takes 3.\nStones: 1", "1"]
    assert str(second[0]["content"]).endswith("Stones: 5\nThe other player takes 1.\nStones: 4")
    assert [sum(span.trained for span in branch.spans) for branch in episode.branches] == [2, 1]
    assert episode.usage.turns == 3
    assert Episode.from_json(json.loads(json.dumps(episode.to_json()))) == episode


@pytest.mark.parametrize("wrong", ["0", "4", "take 1", "", "1 2", "-1", "²"])
def test_an_illegal_move_loses(wrong: str) -> None:
    episode = played(self_play(5), Says("1", wrong))
    assert episode.rewards == {"first": 1.0, "second": 0.0}
    assert episode.scores == {"legal": 0.0}
    assert episode.status is Status.COMPLETED


class Paid(Environment):
    """The first role earns something at its reply, and both at the reply of the second."""

    async def start(self) -> Observation:
        return Observation([{"role": "user", "content": "go"}], role="a")

    async def step(self, reply: Message) -> Step:
        if reply["content"] == "b":
            return Step(rewards={"a": 2.0, "b": 0.5})
        return Step(done=False, messages=[{"role": "user", "content": "go"}], role="b", rewards={"a": 1.0})


def test_rewards_add_up_by_role_and_are_credited_to_the_replies_of_the_role() -> None:
    episode = played(Paid(), Says("a", "b"))
    assert (episode.rewards, episode.reward) == ({"a": 3.0, "b": 0.5}, 1.75)
    assert [[span.reward for span in branch.spans if span.trained] for branch in episode.branches] == [[3.0], [0.5]]


def test_a_role_that_the_rewards_leave_out_earns_nothing_and_not_the_mean_of_the_others() -> None:
    class Forgets(Paid):
        async def step(self, reply: Message) -> Step:
            return Step(rewards={"b": 1.0})

    episode = played(Forgets(), Says("a"))
    assert (episode.rewards, episode.reward_of("a")) == ({"a": 0.0, "b": 1.0}, 0.0)


def test_a_role_that_earns_and_never_replies_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rewards = [{"proposer": 1.0, "sovler": 0.5}, {"proposer": 0.0, "sovler": 0.0}]
    group = Group("g", Task("t", []), [])
    for earned in rewards:
        branches = [branch("proposer"), branch("solver")]
        group.episodes.append(Episode(branches, reward=0.5, rewards=earned))
    unheard = Unheard()
    unheard.check(3, [group])
    unheard.check(4, [group])
    (record,) = caplog.records
    assert "the role 'sovler' earned rewards in step 3 and gave no reply" in record.getMessage()
    assert "Did you mean 'solver'? Roles that replied: proposer, solver" in record.getMessage()
    caplog.clear()
    unheard.check(5, [duel("g", [{"a": 1.0, "b": 0.0}])])
    assert not caplog.records


def test_a_step_has_a_reward_or_rewards_by_role() -> None:
    class Both(Paid):
        async def step(self, reply: Message) -> Step:
            return Step(reward=1.0, rewards={"a": 1.0})

    with pytest.raises(DataError, match="both a reward and rewards by role"):
        played(Both(), Says("a"))


class Broken(Environment):
    """Fails after the second role has replied."""

    async def start(self) -> Observation:
        return Observation([{"role": "user", "content": "go"}], role="a")

    async def step(self, reply: Message) -> Step:
        if reply["content"] == "b":
            raise ConnectionError("the board is away")
        return Step(done=False, messages=[{"role": "user", "content": "go"}], role="b", rewards={"a": 1.0})


class Boards(Environments):
    def make(self, task: Task) -> Environment:
        return Broken()


def test_an_episode_that_fails_in_one_role_fails_whole() -> None:
    generator: Any = Says("a", "b")
    episode = asyncio.run(
        play(
            Boards(), Task("t", []), generator, RENDERER, SAMPLING,
            retries=0, seed=0, session="t/0", timing=Timing(), failures=Failures(),
        )
    )  # fmt: skip
    assert (episode.status, episode.branches, episode.rewards) == (Status.FAILED, [], {})


def test_the_failure_of_one_of_several_engines_ends_the_run() -> None:
    class Away:
        async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
            raise GeneratorError("the engine of b is away")

    generator, away, failures = Says("a"), Away(), Failures()
    with pytest.raises(GeneratorError, match="the engine of b is away"):
        asyncio.run(
            play(
                Boards(), Task("t", []), generator, RENDERER, SAMPLING,
                retries=3, seed=0, session="t/0", timing=Timing(), failures=failures,
                cast={"b": Player(away, RENDERER)},  # type: ignore[arg-type]
            )
        )  # fmt: skip


class Table:
    """A policy for Nim that is a table: the logits of taking 1, 2 or 3 stones from each heap, legal or not."""

    def __init__(self, stones: int) -> None:
        self.logits = torch.zeros(stones + 1, 3, dtype=torch.float64)
        self.greedy = False

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        chances = self.logits[heap_of(RENDERER.decode(prompt))].softmax(0)
        taken = int(chances.argmax()) if self.greedy else random.Random(params.seed).choices(range(3), chances)[0]
        return said(str(taken + 1))

    def learn(self, batch: Batch, trajectories: list[Trajectory], rate: float) -> None:
        """One step of policy gradient, on the move of each reply."""
        logits, loss = self.logits.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
        advantages = GroupAdvantage().estimate(batch).per_token(batch)
        for path, trajectory in zip(batch.paths(), trajectories, strict=True):
            advantage = advantages[path[batch.trained[path]][0]]
            heard = [str(message["content"]) for message in trajectory.messages]
            for said, answer in zip(heard[::2], heard[1::2], strict=True):
                loss = loss - advantage * logits[heap_of(said)].log_softmax(0)[int(answer) - 1]
        loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        self.logits -= rate * logits.grad


def heap_of(text: str) -> int:
    return int(text.rsplit("Stones: ", 1)[1].split()[0].split("<")[0])


def test_self_play_learns_a_small_game_perfectly() -> None:
    """A table of 15 numbers, not a language model: from even chances to a win of every game with five stones."""
    nim, table = Nim(stones=5, games=8), Table(5)

    def accuracy() -> float:
        table.greedy = True
        games = [played(nim.make(task), table).scores["correct"] for task in nim.tasks("test")]
        table.greedy = False
        return statistics.fmean(games)

    before = accuracy()
    for step in range(40):
        made = [
            Group(f"{step}/{task.uid}", task, [played(nim.make(task), table, 1000 * step + i) for i in range(8)])
            for task in nim.tasks("train")
        ]
        table.learn(Batch.from_groups(made), [each for group in made for each in group.trajectories], rate=0.1)
    assert before < 0.7
    assert accuracy() == 1.0


@pytest.mark.slow
def test_two_policies_learn_a_small_game_perfectly() -> None:
    """A table for each seat. Each learns from its own moves alone, and wins every test game of its seat; the other
    seat's heaps that it never saw keep their even chances."""
    nim, first, second = Nim(stones=5, games=8), Table(5), Table(5)

    def won(table: Table, seat: str) -> float:
        table.greedy = True
        games = [
            played(nim.make(task), table).scores["correct"] for task in nim.tasks("test") if task.data.seat == seat
        ]
        table.greedy = False
        return statistics.fmean(games)

    before = won(first, "first"), won(second, "second")
    for step in range(60):
        made = [
            Group(
                f"{step}/{task.uid}", task, [played(nim.make(task), first, 1000 * step + i, second) for i in range(8)]
            )
            for task in nim.tasks("train")
        ]
        for table, seat in ((first, "first"), (second, "second")):
            own = [part for group in made if (part := group.of_roles(seat.__eq__)).episodes]
            table.learn(Batch.from_groups(own), [each for group in own for each in group.trajectories], rate=0.1)
    assert max(before) < 0.9
    assert (won(first, "first"), won(second, "second")) == (1.0, 1.0)
    assert not second.logits[5].any()  # no game leaves the second player a full heap


def test_cheap_replies_lose() -> None:
    graded = asyncio.run(validate(Nim(), 0))
    assert not wrong(graded)
    assert len(graded) == 14


class Pair(Environment):
    """Each of two roles replies once; the longer reply earns more."""

    def __init__(self) -> None:
        self.first = ""

    async def start(self) -> Observation:
        return Observation([{"role": "user", "content": "write letters"}], role="a")

    async def step(self, reply: Message) -> Step:
        length = float(len(reply["content"]))
        if not self.first:
            self.first = f"heard: {reply['content'][:20]!r}"
            told: Message = {"role": "user", "content": self.first}
            return Step(done=False, messages=[told], role="b", rewards={"a": length})
        return Step(rewards={"b": length})


class Pairs(Lowercase):
    named_roles = ("a", "b")

    def make(self, task: Task) -> Environment:
        return Pair()


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_ledger_and_the_records_of_a_resumed_run_are_exact(
    tiny_model: Path, tmp_path: Path, staleness: int
) -> None:
    settings = toy_settings(
        tiny_model, steps=2, data={"type": "tests.rollouts.test_roles:Pairs"}, learner={"max_tokens": 4096},
        sampling={"max_new_tokens": 80, "max_turns": 2, "max_episode_tokens": 600}, generator={"max_context": 1024},
        rollouts={"record_every": 1, "max_staleness": staleness}, evaluation={"enabled": False},
    )  # fmt: skip
    folder = tmp_path / "run"
    start(read_settings(settings), folder)
    resume(folder, ["steps=3"])
    assert not audit(folder).violations
    records = [record for step in (1, 2, 3) for record in read_rollouts(folder, step)]
    assert {record.role for record in records} == {"a", "b"}
    for record in records:
        assert record.reward == len(record.messages[-1]["content"])


def test_a_perfect_player_wins_every_test_game() -> None:
    class Perfect(Says):
        async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
            return said(str(heap_of(RENDERER.decode(prompt)) % 4 or 1))

    nim = Nim(stones=9, games=3)
    assert [played(nim.make(task), Perfect()).scores["correct"] for task in nim.tasks("test")] == [1.0] * 36
    assert legal_move(" 3.\n", 3) == 3


@pytest.mark.parametrize(("reply", "rewards"), [("9", {"first": -1, "second": 1}), ("2", {"first": 1, "second": 0})])
def test_a_reply_that_is_not_a_legal_move_may_cost_more_than_a_game(reply: str, rewards: dict[str, float]) -> None:
    nim = Nim(stones=5, illegal=-1)
    game = nim.make(next(task for task in nim.tasks("train") if task.data.stones == 2))
    step = asyncio.run(game.step({"role": "assistant", "content": reply}))
    assert step.done
    assert step.rewards == rewards
    assert step.scores["legal"] == (reply == "2")
    assert not wrong(asyncio.run(validate(nim, 0)))
