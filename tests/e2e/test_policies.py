"""Two policies that learn in one run, on tiny random models."""

import asyncio
import json
import re
import shutil
import signal
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from tests.engines.server_double import doubles
from tests.forks import whet as command
from tests.other_tokenizers import bpe_tokenizer, save_with
from tests.rollouts.test_roles import Pair, Pairs
from tests.run.test_remote import remote
from tests.toy import read_settings, save_tiny_model, toy_settings, write_recipe
from whet.algorithms.grpo import GroupAdvantage
from whet.base.errors import ConfigError, DataError
from whet.checkpoint.export import export
from whet.config import load
from whet.core.batch import Batch
from whet.core.types import Message, Task
from whet.learner.state import load_weights
from whet.losses.composite import PolicyLoss
from whet.metrics.rollout_file import RolloutRecord, read_rollouts
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.processes.compute import run_computing
from whet.rollouts.audit import audit
from whet.run.evaluate_model import evaluate_model
from whet.run.recipe import Recipe
from whet.run.run import resume, start
from whet.show.charts import chosen
from whet.show.history import History
from whet.tasks.base import Step
from whet.tasks.self_play import Nim, NimGame

PAIRS = "tests.rollouts.test_roles:Pairs"  # two roles, which reply once each


class LenientGame(NimGame):
    """Reads each reply as a move, so that random models play to the end."""

    async def step(self, reply: Message) -> Step:
        most = min(self.left, self.most)
        return await super().step({**reply, "content": str(len(str(reply["content"])) % most + 1)})


class Lenient(Nim):
    def make(self, task: Task) -> NimGame:
        return LenientGame(task)


class Monologue(Pair):
    async def step(self, reply: Message) -> Step:
        return Step(rewards={"a": float(len(str(reply["content"])))})


class Monologues(Pairs):
    """Episodes that end before the second role replies."""

    def make(self, task: Task) -> Monologue:
        return Monologue()


STOP = [*string.ascii_letters, *string.digits]  # a reply that is cut ends the episode before the second role replies


def recipe_of(model: Path, **changes: Any) -> Recipe:
    settings = toy_settings(
        model,
        steps=2,
        data={"type": PAIRS},
        sampling={
            "max_new_tokens": 24,
            "max_turns": 2,
            "max_prompt_tokens": 128,
            "max_observation_tokens": 128,
            "stop": STOP,
        },
        generator={"max_context": 512},
        learner={"max_tokens": 4096},
        policies={"rival": {"plays": ["b"]}},
        evaluation={"enabled": False},
    )
    for section, keys in changes.items():
        merged = isinstance(keys, dict) and section not in ("policies", "evaluation")
        settings[section] = settings.get(section, {}) | keys if merged else keys
    return read_settings(settings)


def weights(folder: Path, step: int, name: str = "") -> dict[str, torch.Tensor]:
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    return load_weights((checkpoint / "policies" / name if name else checkpoint) / "policy")


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


def records(folder: Path, step: int) -> dict[tuple[str, int, str], RolloutRecord]:
    return {(each.uid, each.sample, each.role): each for each in read_rollouts(folder, step)}


def agrees(record: RolloutRecord) -> bool:
    """Generator and learner give a reply the same log-probs; the learner skips replies whose advantage is 0."""
    return record.learner_logprobs is None or record.learner_logprobs == pytest.approx(record.logprobs, abs=1e-4)


def lines(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [each for each in read_metrics(folder / "metrics.jsonl") if each["kind"] == kind]


def test_with_equal_weights_two_policies_play_what_one_plays_against_itself(tiny_model: Path, tmp_path: Path) -> None:
    """The same tokens from the same seeds. From the second step on, each has learned from its own role alone."""
    start(recipe_of(tiny_model, steps=2), tmp_path / "two")
    start(recipe_of(tiny_model, steps=2, policies={}), tmp_path / "one")
    two, one = records(tmp_path / "two", 1), records(tmp_path / "one", 1)
    assert two.keys() == one.keys()
    assert {role for _, _, role in two} == {"a", "b"}
    for key, record in two.items():
        assert record.tokens == one[key].tokens
        assert record.logprobs == one[key].logprobs  # to the bit, although each engine has half of the requests
        assert (record.reward, record.advantage) == (one[key].reward, one[key].advantage)
        assert agrees(record)
    later = records(tmp_path / "two", 2).values()  # sampled by each policy's new weights
    assert all(agrees(record) and record.versions == (1, 1) for record in later)
    assert {record.role for record in later if record.learner_logprobs} == {"a", "b"}
    assert differ(weights(tmp_path / "two", 1), weights(tmp_path / "two", 1, "rival"))
    assert differ(weights(tmp_path / "two", 1), weights(tmp_path / "one", 1))


def test_both_learn_and_are_published_and_measured(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(recipe_of(tiny_model, evaluation={"limit": 4}), folder)
    first, *trained = [each for each in lines(folder) if "loss" in each or "run/model" in each]
    assert first["run/policies/rival/model"] == first["run/model"]
    assert "the main policy plays a; rival plays b" in (folder / "log.txt").read_text()
    for line in trained:
        assert line["tokens/trained"] == line["learner/tokens"] + line["policies/rival/learner/tokens"]
        for name in ("loss", "gradient_norm", "refit/probe_max", "mismatch/token_mult_prob_error", "batch/tokens"):
            assert line[name] != line[f"policies/rival/{name}"] or name == "refit/probe_max"
        assert line["gradient_norm"] > 0 < line["policies/rival/gradient_norm"]
        assert line["role/a/reward"] > 0 < line["role/b/reward"]
    for name in ("", "rival"):
        assert differ(weights(folder, 1, name), weights(folder, 2, name))
    history = History(folder)
    history.read()
    labels = [entry.label for entry in chosen(history)[0]]
    assert {"loss", "loss of rival", "gradient norm of rival", "reward of a", "reward of b"} <= set(labels)
    evaluated = lines(folder, "evaluation")[-1]
    assert evaluated["evaluation/reward"] == pytest.approx(
        (evaluated["evaluation/role/a/reward"] + evaluated["evaluation/role/b/reward"]) / 2
    )
    assert "evaluation/rival/reward" not in evaluated  # both played in the same episodes
    assert not audit(folder).violations


@pytest.mark.slow
def test_a_learning_rate_of_0_leaves_one_policy_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(recipe_of(tiny_model, policies={"rival": {"plays": ["b"], "optimizer": {"lr": 0.0}}}), folder)
    assert not differ(weights(folder, 1, "rival"), weights(folder, 2, "rival"))
    assert differ(weights(folder, 1), weights(folder, 2))
    other = tmp_path / "other"
    rival = {"plays": ["b"], "optimizer": {"lr": 3e-3}}
    start(recipe_of(tiny_model, optimizer={"lr": 0.0}, policies={"rival": rival}), other)
    assert differ(weights(other, 1, "rival"), weights(other, 2, "rival"))
    assert not differ(weights(other, 1), weights(other, 2))


def test_a_policy_that_never_replied_learns_nothing_in_this_step(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(recipe_of(tiny_model, data={"type": "tests.e2e.test_policies:Monologues"}), folder)
    told = [line for line in (folder / "log.txt").read_text().splitlines() if "rival replied in no episode" in line]
    assert ["WARNING" in line for line in told] == [True, False]
    assert "of step 1, so it learns nothing from it. Further such steps are counted" in told[0]
    assert "of step 2" in told[1]
    assert [each.get("policies/rival/silent") for each in lines(folder) if "loss" in each] == [1, 1]
    assert not differ(weights(folder, 1, "rival"), weights(folder, 2, "rival"))
    assert not any(name.startswith("policies/rival/learner") for each in lines(folder) for name in each)
    assert {each.role for each in records(folder, 2).values()} == {"a"}
    assert not audit(folder).violations


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_models_with_other_sizes_tokenizers_and_templates(tiny_model: Path, tmp_path: Path, staleness: int) -> None:
    stranger = save_with(tmp_path / "stranger", bpe_tokenizer(), hidden_size=32, num_hidden_layers=1)
    folder = tmp_path / "run"
    rival = {"plays": ["b"], "model": str(stranger)}
    start(recipe_of(tiny_model, policies={"rival": rival}, rollouts={"max_staleness": staleness}), folder)
    resume(folder, ["steps=3"])
    met = [each for step in (1, 2, 3) for each in records(folder, step).values()]
    assert {each.role for each in met} == {"a", "b"}
    for record in met:
        assert record.prompt.startswith("[INST]") == (record.role == "b")
        assert record.reward == len(record.messages[-1]["content"])
        assert staleness or agrees(record)
    for name in ("", "rival"):
        assert differ(weights(folder, 2, name), weights(folder, 3, name))
    assert weights(folder, 3)["model.norm.weight"].shape != weights(folder, 3, "rival")["model.norm.weight"].shape
    assert not audit(folder).violations
    assert not lines(folder)[-1]["policies/rival/mismatch/token_mult_prob_error"] > 1.01 + staleness


def test_each_policy_has_its_critic(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    algorithm = {"type": "ppo", "group_size": 4, "minibatches": 2}
    start(recipe_of(tiny_model, algorithm=algorithm, checkpoints={"asynchronous": True}), folder)
    trained = [each for each in lines(folder) if "loss" in each]
    assert all(each["critic/loss"] != each["policies/rival/critic/loss"] for each in trained)
    for name in ("", "policies/rival/"):
        one, other = (load_weights(folder / f"checkpoints/step-00000{step}/{name}critic") for step in (1, 2))
        assert differ(one, other)


SAME = ("reward/mean", "role/b/reward", *(f"{whose}{name}" for whose in ("", "policies/rival/") for name in (
    "loss", "gradient_norm", "mismatch/token_mult_prob_error", "batch/tokens", "learner/tokens",
)))  # fmt: skip
ELSEWHERE: dict[str, dict[str, Any]] = {
    "processes": {"cluster": "processes"},
    "two ranks": {"cluster": "processes", "parallel": {"fsdp": 2}},
    "critics on ranks": {
        "cluster": "processes",
        "parallel": {"fsdp": 2},
        "algorithm": {"type": "ppo", "minibatches": 2},
    },
    "replicas": {"generator": {"replicas": 2}},
    "in turns": {"cluster": "processes", "devices": {"placement": "colocated"}},
    "megatron": {"learner": {"type": "megatron"}},
    "megatron on ranks": {"learner": {"type": "megatron"}, "cluster": "processes", "parallel": {"tensor": 2}},
    "ray": {"cluster": {"type": "ray", "cpus_per_rank": 0.25}},
    "ray, together": {"cluster": {"type": "ray", "models": "together"}},
}


def learned(folder: Path) -> list[dict[str, float]]:
    return [{name: each[name] for name in SAME} for each in lines(folder) if "loss" in each]


@pytest.fixture(scope="module")
def here(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, float]]]:
    """The numbers of two policies that learn in the run's process, by algorithm."""

    @cache
    def learned_by(name: str) -> list[dict[str, float]]:
        algorithm = {"type": name, "minibatches": 1 if name == "grpo" else 2}
        recipe = recipe_of(tiny_model, steps=3, algorithm=algorithm)
        return learned(start(recipe, tmp_path_factory.mktemp("here") / name))

    return learned_by


@pytest.mark.slow
@pytest.mark.parametrize("where", ELSEWHERE)
def test_where_the_policies_learn_and_sample_changes_no_number(
    tiny_model: Path, tmp_path: Path, here: Callable[[str], list[dict[str, float]]], where: str
) -> None:
    changes, folder = ELSEWHERE[where], tmp_path / "run"
    for part, extra in (("megatron", "megatron.core"), ("ray", "ray")):
        if part in where:
            pytest.importorskip(extra, reason=f"the extra {part!r} is not installed")
    start(recipe_of(tiny_model, **changes), folder)
    resume(folder, ["steps=3"])
    expected = here(changes.get("algorithm", {"type": "grpo"})["type"])
    assert len(learned(folder)) == len(expected) == 3
    for one, other in zip(learned(folder), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for name in ("", "rival"):
        assert differ(weights(folder, 2, name), weights(folder, 3, name))
    assert not audit(folder).violations


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_policies_sample_on_servers(
    tiny_model: Path, tmp_path: Path, here: Callable[[str], list[dict[str, float]]], staleness: int
) -> None:
    """The main policy on two servers and the other one on its own, or in the run's process. The servers are doubles,
    which compute as the built-in engine does."""
    own = {"type": "torch", "dtype": "float32", "max_context": 512}
    with doubles("vllm", tiny_model, 3) as servers:
        generator = remote(servers[:2], "vllm", folder=str(tmp_path), max_context=512)
        for name, rivals in (
            ("both", remote(servers[2:], "vllm", folder=str(tmp_path), max_context=512)),
            ("one", own),
        ):
            recipe = recipe_of(
                tiny_model, generator=generator, policies={"rival": {"plays": ["b"], "generator": rivals}},
                rollouts={"max_staleness": staleness}, evaluation={"limit": 2},
            )  # fmt: skip
            start(recipe, tmp_path / name)
            resume(tmp_path / name, ["steps=3"])
            for policy in ("", "rival"):
                assert differ(weights(tmp_path / name, 2, policy), weights(tmp_path / name, 3, policy))
            assert not audit(tmp_path / name).violations
            if not staleness:
                assert learned(tmp_path / name) == [pytest.approx(each, rel=1e-4) for each in here("grpo")]


def test_a_policy_is_updated_by_its_own_part_of_the_batch(tiny_model: Path, tmp_path: Path) -> None:
    """One update of self-play's batch, restricted to one role, and one of the role's own batch: the same weights."""

    async def go() -> None:
        async with whet.open(recipe_of(tiny_model, optimizer={"lr": 1e-2}), folder=tmp_path / "run") as run:
            one, other = run.policy, run.policies["rival"]
            groups = await one.sample(run.tasks.next(3), n=4)
            whole = GroupAdvantage()(Batch.from_groups(groups))
            of_role = torch.tensor([uid.endswith("#a") for uid in whole.group_uids])[whole.group]
            restricted, _ = whole.select(of_role.nonzero().squeeze(1))
            own = GroupAdvantage()(one.batch(groups))
            assert own.group_uids == tuple(uid for uid in whole.group_uids if uid.endswith("#a"))
            with pytest.raises(DataError, match="the policy rival replied in none"):
                other.batch([group.of_roles("a".__eq__) for group in groups])
            norms = []
            for policy, batch in ((one, restricted), (other, own)):  # two models that are equal so far
                update = await policy.update(batch.weigh("token"), PolicyLoss())
                norms.append(update.metrics.result()["gradient_norm"])
                await policy.publish()
                await policy.save(tmp_path / (policy.name or "main"))
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
            assert norms[0] > 0

    asyncio.run(go())
    one, other = (load_weights(tmp_path / name / "policy") for name in ("main", "rival"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=2e-4, msg=name)


def test_policies_can_be_called_where_nothing_is_awaited(tiny_model: Path, tmp_path: Path) -> None:
    with whet.open(recipe_of(tiny_model), folder=tmp_path / "run") as run:
        groups = run.policy.sample(run.tasks.next(1), n=2)
        [uid] = run.policies["rival"].batch(groups).group_uids
        assert uid.endswith("#b")
        assert run.policies["rival"].publish().result()["refit/probe_max"] < 1e-4


@pytest.fixture(scope="module")
def nim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of Nim whose two players have different models."""
    folder = tmp_path_factory.mktemp("nim")
    model = save_tiny_model(folder / "model")
    stranger = save_with(folder / "stranger", bpe_tokenizer(), hidden_size=32, num_hidden_layers=1)
    made = recipe_of(
        model,
        steps=4,
        data={"type": "tests.e2e.test_policies:Lenient", "stones": 6, "games": 1},
        sampling={"max_turns": 6, "max_prompt_tokens": 300, "max_observation_tokens": 64},
        generator={"max_context": 1024},
        policies={"rival": {"plays": ["second"], "model": str(stranger), "optimizer": {"lr": 1e-3}}},
        evaluation={"every": 2, "limit": 4},
    )
    return write_recipe(folder / "nim.yaml", made)


@pytest.fixture(scope="module")
def undisturbed(nim: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = command("train", str(nim), "--folder", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits_of_both(nim: Path, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = command("train", str(nim), "--folder", str(folder), WHET_CRASH_AT="step.updated:3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = command("resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    metrics = [[without_time(each) for each in read_metrics(run / "metrics.jsonl")] for run in (folder, undisturbed)]
    for one, other in zip(*metrics, strict=True):
        assert one == other
    for name in ("", "rival"):
        assert not differ(weights(folder, 4, name), weights(undisturbed, 4, name))
        assert differ(weights(folder, 4, name), weights(folder, 3, name))
    assert not audit(folder).violations


def test_each_policy_is_exported_and_evaluated(undisturbed: Path, tmp_path: Path) -> None:
    for name in ("", "rival"):
        exported = export(undisturbed, tmp_path / f"out{name}", 4, policy=name)
        config = json.loads((exported.path / "config.json").read_text())
        assert config["hidden_size"] == (32 if name else 64)
        card = (exported.path / "README.md").read_text()
        assert ("| policy | rival, which plays" in card) == bool(name)
        assert "rival/accuracy" not in card
        measured = lines(undisturbed, "evaluation")[-1][f"evaluation/{name and f'{name}/'}reward"]
        assert re.search(rf"\| reward \| .* \| {measured:.4g} \|", card)
    evaluation = lines(undisturbed, "evaluation")[-1]
    assert {"evaluation/accuracy", "evaluation/rival/accuracy"} <= evaluation.keys()
    report = run_computing(evaluate_model(load(Recipe, undisturbed).value, run=undisturbed))
    assert report.sets["rival"].reward == evaluation["evaluation/rival/reward"]
    assert report.reward == evaluation["evaluation/reward"]
    with pytest.raises(ConfigError, match="has no further policy 'rivl'; there are: rival"):
        export(undisturbed, tmp_path / "another", policy="rivl")


def test_a_checkpoint_without_a_policy_of_the_recipe_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(recipe_of(tiny_model, steps=1, policies={}), folder)
    with pytest.raises(ConfigError, match="holds no weights of the policy"):
        resume(folder, ["steps=2", "policies.rival.plays=[b]"])


def test_a_checkpoint_with_a_policy_that_the_recipe_lacks_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    with pytest.raises(ConfigError, match="policies/rival/policy has weights of a model that this recipe"):
        resume(folder, ["steps=5", "policies={}"])
