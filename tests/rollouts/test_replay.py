"""The steps of an asynchronous run can be replayed to the bit."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.toy import toy_recipe
from whet.base.errors import DataError
from whet.core.types import Episode, Group, Message, Span, Status, Task, Trajectory, Usage
from whet.metrics.sinks.jsonl import read_metrics
from whet.rollouts.audit import audit
from whet.rollouts.replay import drop_groups_after, keep_groups, kept_groups
from whet.run import run


def learned(folder: Path) -> tuple[list[Any], bytes]:
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"][1:]
    weights = (folder / "checkpoints" / f"step-{len(lines):06d}" / "policy" / "model.safetensors").read_bytes()
    return [[line[name] for name in ("loss", "gradient_norm", "batch/tokens")] for line in lines], weights


def test_a_run_ahead_of_step_is_replayed_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    rollouts = {"max_staleness": 2, "order": "ready", "keep_groups": True, "prompts_per_step": 2}
    algorithm = {"type": "grpo", "group_size": 3, "minibatches": 2, "filters": ["dynamic_sampling"]}
    changes: dict[str, Any] = {"algorithm": algorithm, "steps": 5, "evaluation": {"enabled": False}}
    first = run.start(toy_recipe(tiny_model, rollouts=rollouts, **changes), tmp_path / "first")
    assert not audit(first).violations
    assert max(line["staleness/max"] for line in read_metrics(first / "metrics.jsonl") if line["step"]) > 0
    again = toy_recipe(tiny_model, rollouts=rollouts | {"replay": str(first), "keep_groups": False}, **changes)
    assert learned(run.start(again, tmp_path / "again")) == learned(first)


@dataclass(frozen=True, slots=True)
class Sum:
    terms: tuple[int, ...]
    answer: str


def test_the_data_of_typed_tasks_come_back_by_name(tmp_path: Path) -> None:
    keep_groups(tmp_path, 1, [Group("0000001:a", Task("a", [], Sum((1, 2), "3")), [])])
    with pytest.raises(DataError, match=r"task 'b': its data must be values that JSON can hold: .*'object'"):
        keep_groups(tmp_path, 2, [Group("0000001:b", Task("b", [], {"x": object()}), [])])
    (group,) = kept_groups(tmp_path, 1)
    assert group.task.columns == {"terms": [1, 2], "answer": "3"}


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    spans = [Span([1, 2], False), Span([3], True, [-0.1], (1, 2), reward=0.5)]
    episode = Episode(
        [Trajectory(spans, [{"role": "user", "content": "\ud800"}])], 1.5, {"correct": 1.0}, Status.TRUNCATED
    )
    episode.usage, episode.limit = Usage(turns=1), "turns"
    prompt: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "é"}]}]
    groups = [Group("0000001:a", Task("a", prompt, {"x": [1]}), [episode])]
    for step in (1, 2):
        keep_groups(tmp_path, step, groups)
    assert kept_groups(tmp_path, 2) == groups
    drop_groups_after(tmp_path, 1)
    assert kept_groups(tmp_path, 1) == groups
    with pytest.raises(DataError, match=r"was made without rollouts\.keep_groups"):
        kept_groups(tmp_path, 2)
    (tmp_path / "groups" / "step-000001.json").write_text("[{}]")
    with pytest.raises(DataError, match="can't be read as kept groups"):
        kept_groups(tmp_path, 1)
    shutil.rmtree(tmp_path / "groups")
    drop_groups_after(tmp_path, 0)
