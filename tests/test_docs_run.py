"""Pages run from top to bottom in a fresh folder, with a tiny model in place of the built-in one."""

import json
import random
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config

from tests.test_docs import ROOT, blocks
from whet.cli.main import main
from whet.fetch.download import cache_folder
from whet.fetch.smollm2 import NAME
from whet.models.tiny import save_tiny_model

pytestmark = pytest.mark.slow

FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = ["steps=2", "epochs=null", "optimizer.warmup_steps=0", "learner.matmul_precision=highest"]
SHORT_ROWS = [*SHORT, "evaluation.limit=2", "data.batch_size=4"]
SHORT_SAMPLES = [
    *SHORT, "evaluation.limit=2", "rollouts.prompts_per_step=2", "algorithm.group_size=4", "sampling.max_new_tokens=4",
    "rollouts.when_exhausted=smaller_step",
]  # fmt: skip
NOT_RUN = {  # the first words of a command: why it is not run here
    "make quickstart": "installs packages",
    "pip install": "installs packages",
    "source": "is for the shell that follows",
    "whet pipeline rlhf -c tiny --folder": "minutes of computing; tests/pipeline/test_shipped.py runs it",
    "hf download": "a download from the Hub",
    "whet export runs/NAME --out my-model --push": "uploads to the Hub; tests/fetch/test_push.py",
    "whet serve": "a server that never ends; tests/endpoint",
    "whet watch": "a server that never ends; tests/watch",
    "whet export runs/warm --out release --push": "uploads to the Hub; tests/fetch/test_push.py",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder to start from, in which the built-in model is a tiny one."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    save_tiny_model(cache_folder() / NAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "examples", "examples")
    for module in ("rewards", "my_rewards", "my_losses"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def run(command: str) -> None:
    """Run a line of a page, unless it is listed above. Commands that train are made short."""
    words = shlex.split(command, comments=True)
    if not words or command.startswith(tuple(NOT_RUN)):
        return
    assert words[0] in ("whet", "python"), f"{command}: neither run nor listed in NOT_RUN"
    if words[0] == "python":
        arguments, sys.argv = sys.argv, words[1:]
        runpy.run_path(words[1], run_name="__main__")
        sys.argv = arguments
        return
    if words[1] == "train":
        words += SHORT_ROWS if words[2] in ("sft", "dpo") else SHORT_SAMPLES
    if words[1] == "resume":
        words += ["epochs=null", "steps=3"]
    if words[1] == "eval":
        words += ["sampling.max_new_tokens=4"]
    with pytest.raises(SystemExit) as ending:
        main(words[1:])
    assert ending.value.code == 0, command


def test_own_data_becomes_a_model(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="writes the file that a user has")
    dice = random.Random(0)
    sums = [(dice.randrange(100), dice.randrange(100)) for _ in range(200)]
    table = [{"question": f"What is {a} + {b}?", "answer": f"It is {a + b}."} for a, b in sums]
    pandas.DataFrame(table).to_parquet("rows.parquet")
    page = ROOT / "docs/own-data.md"
    blend, pipeline = blocks(page, "yaml")
    Path("blend.yaml").write_text(blend)
    Path("own.yaml").write_text(pipeline)
    (rewards,) = blocks(page, "python")
    Path("rewards.py").write_text(rewards)
    for block in blocks(page, "bash"):
        for command in block.splitlines():
            if "--folder runs/own" not in command:  # the same as with -c tiny, and long
                run(command)
    assert list(Path("my-gguf").glob("*.gguf"))
    result = json.loads(Path("runs/own-tiny/result/result.json").read_text())
    assert "difference" in json.dumps(result)


def test_the_cookbook_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"What is {n} + 1?", "completion": str(n + 1)} for n in range(250)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(
        "def right(answer, completion):\n    return {'reward': len(answer) / 9, 'correct': len(answer) > 3}\n"
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    for language, text in FENCE.findall((ROOT / "docs/cookbook.md").read_text(encoding="utf-8")):
        if language == "bash":
            for command in text.splitlines():
                run(command)
        elif "class Bounded" in text:
            Path("my_losses.py").write_text(text)
        else:
            exec(compile(_short(text), "cookbook", "exec"), {"__name__": "__main__"})
    assert json.loads(Path("runs/tracked/trackers/wandb.json").read_text())
    assert list(Path("runs/profiled/profile").iterdir())
    rated = [json.loads(line) for line in Path("rated.jsonl").read_text().splitlines()]
    assert {"prompt", "completion", "pass_rate"} <= rated[0].keys()


def _short(text: str) -> str:
    text = re.sub(r"steps=\d+", 'steps=1, sampling={"max_new_tokens": 4, "max_prompt_tokens": 2000}', text)
    return text.replace('"grpo", ', '"grpo", "sampling.max_new_tokens=4", ')


def write_rows(file: str, rows: list[dict[str, Any]]) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(count: int) -> list[dict[str, Any]]:
    """Rows as GSM8K has them."""
    return [{"question": f"What is {n} + 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in range(count)]


def run_page(name: str, instead: dict[str, str] | None = None) -> None:
    """Run each command of a page. ``instead`` has what a reader replaces on the page, and what stands there here."""
    for block in blocks(ROOT / f"docs/{name}.md", "bash"):
        for command in block.splitlines():
            for printed, here in (instead or {}).items():
                command = command.replace(printed, here)
            run(command)


def test_the_page_on_trackers_runs(folder: Path) -> None:
    run_page("trackers")
    assert list(Path("runs").glob("quickstart-*/trackers/wandb.json"))


def test_the_page_on_planning_runs(folder: Path) -> None:
    DeepseekV3Config().save_pretrained("deepseek-v3")
    run_page("planning")


def test_the_page_on_lineage_runs(folder: Path) -> None:
    write_rows("raw.jsonl", [{"prompt": f"{n} + 1", "chosen": f"{n + 1}", "rejected": "?"} for n in range(200)])
    Path("blend.yaml").write_text("sources: {mine: {rows: {type: preference, path: raw.jsonl}}}\n")
    run("whet prep blend.yaml --out prepared")
    run("whet train dpo data.path='prepared/train-*.jsonl' --folder runs/dpo")
    run("whet export runs/dpo --out my-model")
    run_page("lineage")
