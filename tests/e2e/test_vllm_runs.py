"""Whole runs that sample with vLLM: in step, asynchronously, with an adapter alone, and with an agent."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.e2e.test_agents import SETTINGS as AGENTS
from tests.e2e.test_judged_runs import judged
from tests.e2e.test_learning import lines
from tests.e2e.test_policies import recipe_of
from tests.e2e.test_self_judged_runs import OWN
from tests.toy import toy_recipe
from whet.rollouts.audit import audit
from whet.run import run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ASYNCHRONOUS: dict[str, Any] = {
    "rollouts": {"prompts_per_step": 3, "max_staleness": 1},
    "algorithm": {"type": "grpo", "group_size": 4, "loss": {"type": "policy", "correction": "tis"}},
}

SMALL = {
    "type": "vllm", "dtype": "float32", "max_batch": 16, "max_context": 256, "cache_gib": 0.1, "threads": 1,
    "deadline": 120.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="in step"),
        pytest.param(ASYNCHRONOUS, id="asynchronous"),
        pytest.param(
            {"model": {"lora": {"rank": 4}}, "weights": {"lora": "adapter"}, "optimizer": {"lr": 0.01}}, id="adapter"
        ),
        pytest.param({**AGENTS, "checkpoints": {"every": 1}}, id="agent"),
    ],
)
def test_a_run_on_vllm_proves_each_refit_and_trains_each_prompt_once(
    changes: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"evaluation": {"limit": 2}, **changes, "generator": SMALL}
    folder = run.start(toy_recipe(tiny_model, steps=3, **settings), tmp_path / "run")
    steps = lines(folder, "train")[1:]
    assert len(steps) == 3
    assert all(0 <= line["refit/probe_mean"] < 1e-3 for line in steps)
    if "rollouts" not in changes:
        assert all(line["mismatch/token_mult_prob_error"] < 1.01 for line in steps)
    assert any(line["gradient_norm"] > 0 for line in steps)
    counts = audit(folder)
    assert not counts.violations
    assert sum(outcomes["trained"] for outcomes in counts.by_epoch().values()) == 3 * 3


@pytest.mark.parametrize("changes", [pytest.param({}, id="in step"), pytest.param(ASYNCHRONOUS, id="asynchronous")])
def test_each_of_two_policies_has_its_vllm_engine(changes: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    ranks = {"cluster": {"type": "processes"}, "parallel": {"fsdp": 2}}
    folder = run.start(
        recipe_of(tiny_model, **changes, **ranks, generator=SMALL | {"max_context": 512}), tmp_path / "r"
    )
    steps = lines(folder, "train")[1:]
    assert len(steps) == 2
    for whose in ("", "policies/rival/"):
        assert all(0 <= line[f"{whose}refit/probe_mean"] < 1e-3 for line in steps)
        assert all(line[f"{whose}gradient_norm"] > 0 for line in steps)
        if not changes:
            assert all(line[f"{whose}mismatch/token_mult_prob_error"] < 1.01 for line in steps)
    assert not audit(folder).violations


@pytest.mark.parametrize("changes", [pytest.param({}, id="in step"), pytest.param(ASYNCHRONOUS, id="asynchronous")])
def test_the_policy_judges_itself_on_vllm_as_a_hosted_copy_would_before_the_first_step(
    changes: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"evaluation": {"enabled": False}, **changes, "generator": SMALL}
    own = run.start(toy_recipe(tiny_model, steps=2, data=judged(tiny_model, judge=OWN), **settings), tmp_path / "own")
    hosted = run.start(toy_recipe(tiny_model, steps=1, data=judged(tiny_model), **settings), tmp_path / "hosted")
    [mine, my_next], [theirs] = lines(own, "train")[1:], lines(hosted, "train")[1:]
    assert 0 < my_next["reward/mean"] < 1
    assert not any("episodes/failed" in line for line in (mine, my_next))
    if not changes:
        assert mine["reward/mean"] == pytest.approx(theirs["reward/mean"], rel=1e-3)
