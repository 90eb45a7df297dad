"""Runs that learn with the experts that their generator chose."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_clusters import numbers
from tests.tiny import tiny_qwen3_moe
from tests.toy import save_tiny_model, toy_recipe
from whet.base.errors import ConfigError
from whet.diagnose.plan import make_plan
from whet.run.run import resume, start


def replaying(folder: Path, **changes: Any) -> Any:
    rollouts = {"prompts_per_step": 2, "router_replay": True, **changes.pop("rollouts", {})}
    return toy_recipe(folder, rollouts=rollouts, generator={"type": "torch", "dtype": "bfloat16"}, **changes)


def test_a_run_learns_with_the_generators_experts_and_its_kept_groups_give_the_same(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", tiny_qwen3_moe)
    first = start(replaying(model, steps=2, rollouts={"keep_groups": True, "max_staleness": 1}), tmp_path / "first")
    resume(first, ["steps=3"])
    steps = numbers(first)[1:]
    assert len(steps) == 3
    assert all(0.5 < row["experts/replayed"] < 1 for row in steps), "all but the last token of each answer"
    again = start(replaying(model, steps=3, rollouts={"replay": str(first), "max_staleness": 1}), tmp_path / "again")
    for one, other in zip(steps, numbers(again)[1:], strict=True):
        assert [one[name] for name in ("loss", "gradient_norm")] == [other[name] for name in ("loss", "gradient_norm")]


def test_engines_that_cannot_replay_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which this generator does not report; set generator=torch"):
        toy_recipe(tmp_path, rollouts={"router_replay": True}, generator={"type": "vllm"})
    for layout in ({"tensor": 2}, {"pipeline": 2}):
        with pytest.raises(ConfigError, match=r"do not reach layers that parallel\.tensor or pipeline cuts"):
            replaying(tmp_path, cluster={"type": "processes"}, parallel=layout)
    dense = replaying(save_tiny_model(tmp_path / "dense"), steps=1)
    assert any("router_replay is for experts of deepseek_v3" in line for line in make_plan(dense, runtime=0).warnings)
    with pytest.raises(ConfigError, match="but this model is a llama; leave it out"):
        start(dense, tmp_path / "run")
