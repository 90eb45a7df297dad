"""Whole runs whose judge is their policy: repeatable, asked with the weights of the moment, and not a part of what is
trained."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_judged_runs import judged
from tests.e2e.test_learning import lines
from tests.e2e.test_resume import metrics
from tests.engines.server_double import doubles
from tests.run.test_remote import remote
from tests.tiny import tiny_llama
from tests.toy import save_tiny_model, toy_recipe
from whet.base.errors import WhetError
from whet.metrics.rollout_file import read_rollouts
from whet.processes.compute import run_computing
from whet.run import run
from whet.run.evaluate_model import evaluate_model
from whet.run.recipe import Recipe

OWN = {"model": "policy", "verdict": "logprobs"}
WRITTEN = {"model": "policy", "temperature": 1.0, "max_tokens": 1, "retries": 8}  # one byte
BYTES = [byte for byte in map(chr, range(128)) if byte.strip("*_`\"'.").strip()] + ["\ufffd"]
ANY_BYTE = {byte: number / len(BYTES) for number, byte in enumerate(BYTES)}
NARROW = {"max_batch": 2}  # fewer than the episodes and the questions about them
ONE_STEP_OFF = {
    "steps": 4,
    "algorithm": {"type": "grpo", "group_size": 4, "loss": {"type": "policy", "correction": "tis"}},
    "rollouts": {"prompts_per_step": 2, "max_staleness": 1},
}


def self_judged(model: Path, **changes: Any) -> Recipe:
    data = judged(model, judge=OWN)
    return toy_recipe(model, **{"data": data, "steps": 2, "generator": NARROW, "evaluation": {"limit": 2}, **changes})


def test_a_run_resumes_to_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    whole = metrics(run.start(self_judged(tiny_model, steps=3), tmp_path / "whole"))
    stopped = run.start(self_judged(tiny_model), tmp_path / "stopped")
    run.resume(stopped, ["steps=3"])
    assert metrics(stopped)[-2:] == whole[-2:]  # the last step, and the evaluation after it
    evaluated = lines(tmp_path / "whole", "evaluation")
    assert 0 < evaluated[0]["evaluation/reward"] < 1
    assert evaluated[0]["evaluation/reward"] != evaluated[-1]["evaluation/reward"]


@pytest.mark.usefixtures("forked_children")
def test_the_weights_of_the_moment_judge_and_only_answers_are_trained(tiny_model: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"evaluation": {"enabled": False}, "rollouts": {"prompts_per_step": 3, "record_every": 1}}
    own = run.start(self_judged(tiny_model, **changes), tmp_path / "own")
    frozen = run.start(self_judged(tiny_model, data=judged(tiny_model), **changes), tmp_path / "frozen")
    [mine, my_next], [their, their_next] = lines(own, "train")[1:], lines(frozen, "train")[1:]
    assert mine["reward/mean"] == pytest.approx(their["reward/mean"], rel=1e-4), "before the first step"
    assert my_next["reward/mean"] != pytest.approx(their_next["reward/mean"], rel=1e-4), "the frozen one is older"
    for name in ("tokens/trained", "answer/tokens", "episode/turns", "episode/branches", "batch/tokens"):
        assert mine[name] == their[name]
    assert [record.answer for record in read_rollouts(own, 1)] == [record.answer for record in read_rollouts(frozen, 1)]


@pytest.mark.parametrize(
    "rollouts",
    [
        pytest.param({"max_staleness": 1}, id="one step off"),
        pytest.param({"max_staleness": 1, "partial": True, "order": "ready"}, id="partial", marks=pytest.mark.slow),
    ],
)
def test_questions_wait_for_new_weights_in_an_asynchronous_run(
    tiny_model: Path, tmp_path: Path, rollouts: dict[str, Any]
) -> None:
    made = self_judged(tiny_model, **ONE_STEP_OFF | {"rollouts": {"prompts_per_step": 2, **rollouts}})
    judged_throughout(run.start(made, tmp_path / "run"))


def judged_throughout(folder: Path) -> None:
    trained = lines(folder, "train")[1:]
    assert len(trained) == 4
    assert all(0 < line["reward/mean"] < 1 for line in trained)
    assert not any("episodes/failed" in line for line in trained)


def of_the_learning(folder: Path) -> list[dict[str, Any]]:
    """The metrics that don't tell which engine sampled, which has its own requests and proofs."""
    engines = ("refit/", "generator/", "mismatch/", "run/")
    return [{key: value for key, value in line.items() if not key.startswith(engines)} for line in metrics(folder)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose verdicts depend on the question more than on the seed."""

    def build() -> Any:
        model = tiny_llama()
        model.lm_head.weight.data *= 20.0
        return model

    return save_tiny_model(tmp_path_factory.mktemp("sure"), build)


@pytest.mark.slow
@pytest.mark.parametrize("judge", [OWN, WRITTEN], ids=["logprobs", "text"])
def test_each_replica_judges_with_the_weights_of_the_moment(model: Path, tmp_path: Path, judge: dict[str, Any]) -> None:
    """The same learning as with one engine: a verdict is the same by each replica."""
    data, replicas = judged(model, judge=judge, choices=ANY_BYTE), NARROW | {"replicas": 2}
    one = run.start(self_judged(model, steps=3, data=data), tmp_path / "one")
    two = run.start(self_judged(model, steps=3, data=data, generator=replicas), tmp_path / "two")
    assert of_the_learning(two) == of_the_learning(one)
    assert lines(one, "train")[1]["reward/std"] > 0
    asynchronous = self_judged(model, **ONE_STEP_OFF, data=data, generator=replicas)
    judged_throughout(run.start(asynchronous, tmp_path / "one step off"))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_servers_write_the_verdicts_of_the_policy_that_they_serve(model: Path, tmp_path: Path, protocol: str) -> None:
    """The servers are doubles, which compute as the built-in engine does."""
    data = judged(model, judge=WRITTEN, choices=ANY_BYTE)
    with doubles(protocol, model, 2) as servers:
        generator = remote(servers, protocol, folder=str(tmp_path))
        made = self_judged(model, steps=3, data=data, generator=generator)
        expected = of_the_learning(run.start(made, tmp_path / "servers"))
        asynchronous = self_judged(model, **ONE_STEP_OFF, data=data, generator=generator)
        judged_throughout(run.start(asynchronous, tmp_path / "one step off"))

        def lose(step: int, values: dict[str, Any]) -> None:
            if step == 1:
                servers[0].kill()

        lost = run.start(made, tmp_path / "lost", on_step=lose)
    assert of_the_learning(lost) == expected
    assert sum(line.get("generator/lost", 0) for line in lines(lost, "train")) == 1
    if protocol == "vllm":  # SGLang's seeds have fewer bits
        assert of_the_learning(run.start(self_judged(model, steps=3, data=data), tmp_path / "built-in")) == expected


def test_the_policy_compares_the_answers_of_a_group(tiny_model: Path, tmp_path: Path) -> None:
    data = {"type": "genrm", "judge": OWN, "taskset": {"type": "tests.toy:Lowercase"}}
    first, second = (run.start(self_judged(tiny_model, data=data), tmp_path / name) for name in ("first", "second"))
    assert metrics(first) == metrics(second)
    assert all(1 <= line["scores/genrm"] <= 5 for line in lines(first, "train")[1:])


def test_a_part_of_a_blend_and_an_evaluation_set_are_judged(tiny_model: Path, tmp_path: Path) -> None:
    parts = {"own": {"taskset": judged(tiny_model, judge=OWN)}, "rule": {"taskset": "tests.toy:Lowercase"}}
    evaluation = {"limit": 2, "sets": {"more": {"data": judged(tiny_model, judge=OWN), "limit": 2}}}
    made = self_judged(tiny_model, data={"type": "blend", "of": parts}, evaluation=evaluation)
    folder = run.start(made, tmp_path / "run")
    assert all("env/own/scores/grade" in line or "env/own/reward" in line for line in lines(folder, "train")[1:])
    assert 0 < lines(folder, "evaluation")[-1]["evaluation/more/reward"] < 1
    report = run_computing(evaluate_model(made, limit=2))
    assert (report.n, report.sets["own"].n, report.sets["more"].n) == (4, 2, 2)


def test_a_policy_that_writes_no_verdict_trains_on_nothing(tiny_model: Path, tmp_path: Path) -> None:
    data = judged(tiny_model, judge={"model": "policy", "max_tokens": 4, "retries": 1}, choices={"Yes": 1.0, "No": 0.0})
    made = self_judged(tiny_model, data=data, rollouts={"retries": 0}, evaluation={"enabled": False})
    with pytest.raises(WhetError, match="the policy as the judge gave no verdict on"):
        run.start(made, tmp_path / "run")
    assert [line for line in metrics(tmp_path / "run") if "reward/mean" in line] == []
