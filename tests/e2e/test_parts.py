"""Runs on prompts in parts: the same bits as on their texts, also resumed; images are refused before the first step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.toy import Lowercase, toy_recipe
from whet.base.errors import DataError
from whet.core.content import text_of
from whet.core.types import Task
from whet.metrics.rollout_file import read_rollouts
from whet.metrics.sinks.jsonl import read_metrics, without_time
from whet.run import run


class InParts(Lowercase):
    """The same prompts, each in two parts, or with an image."""

    image: bool = False

    def tasks(self, split: str) -> Sequence[Task]:
        tasks = [*super().tasks(split)]
        for task in tasks:
            text = text_of(task.prompt[0]["content"])
            task.prompt[0]["content"] = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
            if self.image:
                task.prompt[0]["content"].append({"type": "image", "url": "cat.png"})
        return tasks


def trained(folder: Path) -> list[dict[str, Any]]:
    return [without_time(line) for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def test_prompts_in_parts_train_to_the_same_bits_and_resume(tiny_model: Path, tmp_path: Path) -> None:
    rollouts = {"max_staleness": 1, "prompts_per_step": 2}  # groups in flight are in the checkpoint
    plain = run.start(toy_recipe(tiny_model, steps=3, rollouts=rollouts), tmp_path / "plain")
    data = {"type": "tests.e2e.test_parts:InParts"}
    parts = run.start(toy_recipe(tiny_model, steps=2, data=data, rollouts=rollouts), tmp_path / "parts")
    run.resume(parts, ["steps=3"])
    losses = [line.get("loss") for line in trained(plain)]  # None: all groups of the step have equal rewards
    assert [line.get("loss") for line in trained(parts)] == losses
    assert any(losses)
    for step in (1, 2, 3):
        cut, whole = [*read_rollouts(parts, step)], [*read_rollouts(plain, step)]
        assert [record.tokens for record in cut] == [record.tokens for record in whole]
        assert [record.prompt for record in cut] == [record.prompt for record in whole]
        for record, other in zip(cut, whole, strict=True):
            assert isinstance(record.messages[0]["content"], list)
            assert text_of(record.messages[0]["content"]) == other.messages[0]["content"]


def test_an_image_in_a_prompt_is_refused_before_the_first_step(tiny_model: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(tiny_model, data={"type": "tests.e2e.test_parts:InParts", "image": True})
    words = r"^message 1 of task toy/t(rain|est)/0 has an image, where only text can be read; "
    with pytest.raises(DataError, match=words):
        run.start(recipe, tmp_path / "run")
