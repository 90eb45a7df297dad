"""``whet.open``: loops of one's own over a policy, awaited and blocking."""

import asyncio
import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import whet
from tests.toy import Lowercase, toy_recipe
from whet.algorithms.grpo import GroupAdvantage
from whet.base.errors import ConfigError, DataError, RefitError
from whet.core.types import Episode, Group, Status, Task
from whet.losses.composite import PolicyLoss
from whet.metrics import Metrics
from whet.run import run as runs
from whet.weights.in_process import InProcessSync

STEPS = 3


def by_hand(recipe, folder: Path) -> list[dict[str, float]]:
    async def go() -> list[dict[str, float]]:
        lines = []
        async with whet.open(recipe, folder=folder) as run:
            for step in range(1, STEPS + 1):
                groups = await run.policy.sample(run.tasks.next(recipe.rollouts.prompts_per_step), n=4)
                batch = GroupAdvantage()(run.policy.batch(groups))
                stats = await run.policy.update(batch.weigh("token"), PolicyLoss())
                published = await run.policy.publish()
                lines.append(run.log(step, stats, published, {"mine": step / 2}))
        return lines

    return asyncio.run(go())


def test_a_loop_of_ones_own_learns_what_train_learns(tiny_model: Path, tmp_path: Path) -> None:
    """The same tasks, seeds, advantages and updates: the same numbers, to the bit."""
    recipe = toy_recipe(
        tiny_model,
        steps=STEPS,
        algorithm={"type": "grpo", "group_size": 4},
        evaluation={"enabled": False},
        checkpoints={"every": 0},
    )
    lines = by_hand(recipe, tmp_path / "own")
    runs.start(recipe, tmp_path / "train")
    trained = [json.loads(line) for line in (tmp_path / "train" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in trained if "loss" in line}
    assert len(steps) == STEPS
    for step, line in enumerate(lines, start=1):
        for name in ("loss", "gradient_norm", "reward/mean", "answer/tokens"):
            assert line[name] == steps[step][name], (step, name)
        assert line["mine"] == step / 2
    written = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [line["mine"] for line in written if "mine" in line] == [0.5, 1.0, 1.5]
    assert (tmp_path / "own" / "report.html").exists()


def test_a_policy_is_saved_and_restored_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        recipe = toy_recipe(tiny_model, steps=STEPS, evaluation={"enabled": False})
        async with whet.open(recipe, folder=tmp_path / "run") as run:
            groups = await run.policy.sample(run.tasks.next(2), n=2)
            batch = GroupAdvantage(divide_by_std=False)(run.policy.batch(groups)).weigh("sequence")
            await run.policy.save(tmp_path / "saved")
            before = (await run.policy.score(batch, {"logprobs"}))["logprobs"]
            await run.policy.update(batch, PolicyLoss())
            changed = (await run.policy.score(batch, {"logprobs"}))["logprobs"]
            assert not changed.equal(before)
            await run.policy.load(tmp_path / "saved")
            assert (await run.policy.score(batch, {"logprobs"}))["logprobs"].equal(before)
            with pytest.raises(ConfigError, match="is not empty"):
                await run.policy.save(tmp_path / "saved")
            with pytest.raises(ConfigError, match="holds no weights of the policy"):
                await run.policy.load(tmp_path)

    asyncio.run(go())


def test_the_reference_and_held_out_tasks_are_within_reach(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        recipe = toy_recipe(tiny_model, steps=STEPS, evaluation={"limit": 2})
        async with whet.open(recipe, folder=tmp_path / "run") as run:
            batch = run.policy.batch(await run.policy.sample(run.tasks.next(1), n=2))
            scored = await run.policy.score(batch, {"logprobs", "reference_logprobs"})
            assert batch.reference_logprobs is not None
            assert scored["reference_logprobs"].equal(scored["logprobs"]), "nothing is trained yet"
            assert (await run.evaluate())["evaluation/n"] == 2

    asyncio.run(go())


def test_without_await_the_same_methods_block(tiny_model: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(tiny_model, steps=STEPS, evaluation={"enabled": False})
    with whet.open(recipe, folder=tmp_path / "run") as run:
        groups = run.policy.sample(run.tasks.next(2), n=2)
        batch = GroupAdvantage()(run.policy.batch(groups))
        stats = run.policy.update(batch.weigh("token"), PolicyLoss())
        run.policy.publish()
        assert run.log(1, stats)["gradient_norm"] >= 0
        assert run.policy.version == 1
    with pytest.raises(ConfigError, match="not empty"):
        whet.open(recipe, folder=tmp_path / "run")
    for call in (run.evaluate, lambda: run.policy.publish(0), run.source.next_groups):
        with pytest.raises(ConfigError, match="the run is closed; call it inside of the run's `with` block"):
            call()
    assert run._loop.is_closed()


def test_mistakes_are_named(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        recipe = toy_recipe(tiny_model, steps=STEPS, evaluation={"enabled": False})
        async with whet.open(recipe, folder=tmp_path / "run") as run:
            groups = await run.policy.sample(run.tasks.next(1), n=2)
            with pytest.raises(DataError, match=r"batch\.weigh"):
                await run.policy.update(run.policy.batch(groups), PolicyLoss())
            with pytest.raises(ConfigError, match="there is no role 'critic'; the recipe's algorithm has: policy"):
                await run.policy.score(run.policy.batch(groups), {"values"}, role="critic")
            lost = Group("lost", Task("t", []), [Episode([], status=Status.FAILED, error="the shell is away")])
            assert run.policy.batch([*groups, lost]).group_uids == (groups[0].uid,)
            with pytest.raises(DataError, match=r"1 of 1 groups failed .* the shell is away"):
                run.policy.batch([lost])

    asyncio.run(go())


def test_a_version_counts_once_its_weights_have_arrived(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> Metrics:
        raise RefitError("the weights were lost")

    recipe = toy_recipe(tiny_model, steps=1, evaluation={"enabled": False})
    with whet.open(recipe, folder=tmp_path / "run") as run:
        before = run.policy.version
        with monkeypatch.context() as patched:
            patched.setattr(InProcessSync, "publish", lost)
            with pytest.raises(RefitError, match="the weights were lost"):
                run.policy.publish()
        assert run.policy.version == before
        run.policy.publish()
        assert run.policy.version == before + 1


def test_wrong_arguments_of_a_loop_of_ones_own_are_named(tiny_model: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(tiny_model, steps=1, evaluation={"enabled": False})
    with whet.open(recipe, folder=tmp_path / "run") as run:
        policy, tasks = run.policy, run.tasks.next(1)
        groups = policy.sample(tasks, n=2)
        batch = GroupAdvantage()(policy.batch(groups)).weigh("token")
        for call, words in (
            (lambda: policy.sample(tasks[0], n=2), "sample takes a list of tasks, .* not Task"),
            (lambda: policy.sample(["hello"], n=2), r"sample takes a list of tasks, .* not \['hello'\]"),
            (lambda: policy.sample(tasks, n=0), "n is 0; give a whole number from 1 on"),
            (lambda: policy.sample(tasks, n=1.5), "n is 1.5; give a whole number"),
            (lambda: policy.batch([]), r"batch takes a list of groups, as sample returns, not \[\]"),
            (lambda: policy.batch(groups[0].episodes), "batch takes a list of groups"),
            (lambda: policy.batch(groups[0]), "batch takes a list of groups, .* not Group"),
            (lambda: run.tasks.next(-1), "next returns n tasks, and n is -1; give a whole number from 1 on"),
            (lambda: policy.update(groups, PolicyLoss()), "update takes a batch, .* not a list"),
            (lambda: policy.update(batch, PolicyLoss), "update takes a loss, .* not the class PolicyLoss; call it"),
            (lambda: policy.update(batch, "policy"), "update takes a loss, .* not a str"),
            (lambda: policy.update(batch, lambda output, batch: None), "update takes a loss, .* not a function"),
            (lambda: run.log("1"), "log takes the number of a step, not '1'"),
            (lambda: run.log(1, None), "log takes results of updates and dicts of numbers, not a NoneType"),
            (lambda: run.log(1, {"mine": "abc"}), "the metric mine is 'abc'; it must be a number"),
            (lambda: run.log(1, {"mine": [1, 2]}), r"the metric mine is \[1, 2\]; it must be a number"),
        ):
            with pytest.raises(DataError, match=words):
                call()
        assert policy.score(batch, "logprobs").keys() == policy.score(batch, ["logprobs"]).keys() == {"logprobs"}
        logged = run.log(1, {"mine": torch.tensor(3.0)})
        assert type(logged["mine"]) is float
        assert "reward/mean" in logged, "a refused call takes no metrics"
    with pytest.raises(ConfigError, match="log: the run is closed"):
        run.log(2, {"mine": 1.0})


class Stubborn(Lowercase):
    """The first task fails with an error of the run; episodes of the others wait until they are cancelled."""

    waiting: ClassVar[list[str]] = []

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if task.uid == self.tasks("train")[0].uid:
            while len(self.waiting) < 2:
                await asyncio.sleep(0)
            raise ConfigError("the run can't go on")
        self.waiting.append(task.uid)
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting.remove(task.uid)
        return {"reward": 0.0}


def test_no_episode_is_left_when_sampling_has_failed(tiny_model: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(tiny_model, data={"type": "tests.run.test_open:Stubborn"}, evaluation={"enabled": False})

    async def go() -> None:
        async with whet.open(recipe, folder=tmp_path / "run") as run:
            with pytest.raises(ConfigError, match="the run can't go on"):
                await run.policy.sample(Stubborn().tasks("train")[:3])
            assert Stubborn.waiting == []

    asyncio.run(go())
