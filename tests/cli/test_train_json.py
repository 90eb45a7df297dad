"""``whet train --json`` and ``whet resume --json`` print the result alone on standard output."""

import json
from pathlib import Path

from tests.forks import whet
from tests.rows import write_rows


def test_the_result_of_a_run_is_json(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "completion": str(n + 1)} for n in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    settings = (f"model={tiny_model}", f"data.path={path}", "data.batch_size=4", "epochs=null", "steps=1")
    trained = whet("train", "sft", *settings, "--folder", str(tmp_path / "run"), "--json")
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout)
    assert (result["folder"], result["state"], result["step"]) == (str(tmp_path / "run"), "finished", 1)
    assert result["loss_after"] < result["loss_before"]
    assert "step 1/1" in trained.stderr
    resumed = whet("resume", result["folder"], "steps=2", "--json")
    assert json.loads(resumed.stdout)["step"] == 2
    refused = whet("train", "sft", *settings, "--json", "--batch", "local")
    assert refused.returncode == 2
    assert "whet runs --json" in refused.stderr
