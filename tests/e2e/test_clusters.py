"""A run does not depend on where its workers are."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.toy import toy_recipe
from whet.run import resume, start

_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")


def numbers(folder: Path) -> list[dict[str, Any]]:
    """What the steps of training measured, without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time")} for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("cluster", ["processes", pytest.param("ray", marks=[_RAY, pytest.mark.slow])])
def test_a_run_on_another_cluster_gives_the_same_numbers(cluster: str, tiny_model: Path, tmp_path: Path) -> None:
    here = start(toy_recipe(tiny_model, steps=3), tmp_path / "here")
    there = start(toy_recipe(tiny_model, steps=2, cluster={"type": cluster}), tmp_path / "there")
    resume(there, ["steps=3"])
    assert [row["step"] for row in numbers(there)][-3:] == [1, 2, 3]
    assert numbers(there) == numbers(here)
