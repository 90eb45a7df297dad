"""Pages run from top to bottom in a fresh folder, with a tiny model in place of the built-in one."""

import json
import random
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config

from tests.chat_server import chat_server
from tests.test_docs import ROOT, blocks, split
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
    "source .venv/bin/activate": "is for the shell that follows",
    "whet pipeline rlhf -c tiny --folder": "minutes of computing; tests/pipeline/test_shipped.py runs it",
    "hf download": "a download from the Hub",
    "whet export runs/NAME --out my-model --push": "uploads to the Hub; tests/fetch/test_push.py",
    "whet serve": "a server that never ends; tests/endpoint",
    "whet watch": "a server that never ends; tests/watch",
    "whet export runs/warm --out release --push": "uploads to the Hub; tests/fetch/test_push.py",
}
INSTEAD = (  # page, what it prints, what is run here, why
    (
        "getting-started",
        "whet train quickstart",
        "whet train quickstart --folder RUN model.lora.rank=2",
        "RUN is this run, and has LoRA because the page exports an adapter, too",
    ),
    (
        "checkpoints",
        "resume s3://bucket/runs/first",
        "resume s3://bucket/runs/first --folder runs/second",
        "is for another machine",
    ),
    ("checkpoints", "s3://", "file://{folder}/", "there is no object store"),
    ("evaluation", "http://127.0.0.1:8000/v1", "{server}", "a server of the test has any free port"),
)
RUN_HERE = (
    "own-data", "cookbook", "trackers", "planning", "lineage",
    "prep", "checkpoints", "getting-started", "evaluation", "pipelines",
)  # fmt: skip


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
    words = split(command)
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
        words += ["epochs=null", "steps=4" if "steps=80" in words else "steps=3"]
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


def run_page(name: str, **values: object) -> None:
    """Run each command of a page, with what stands in ``INSTEAD`` replaced; ``values`` are for its braces."""
    for block in blocks(ROOT / f"docs/{name}.md", "bash"):
        for command in block.splitlines():
            for page, printed, here, _ in INSTEAD:
                command = command.replace(printed, here.format(**values)) if page == name else command
            run(command)


def test_the_tables_name_what_is_on_a_page() -> None:
    lines = [
        line for page in RUN_HERE for block in blocks(ROOT / f"docs/{page}.md", "bash") for line in block.splitlines()
    ]
    assert not [beginning for beginning in NOT_RUN if not any(line.startswith(beginning) for line in lines)]
    assert not [printed for _, printed, _, _ in INSTEAD if not any(printed in line for line in lines)]


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


def test_the_page_on_preparation_runs(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="writes the files that a user has")
    blend, prompts, _ = blocks(ROOT / "docs/prep.md", "yaml")
    Path("blend.yaml").write_text(blend)
    Path("mine.yaml").write_text(prompts)
    Path("my_rewards.py").write_text("def right(text, answer):\n    return float(answer in text)\n")
    write_rows("train.jsonl", sums(200))
    write_rows("gsm8k-test.jsonl", [{"question": "How many are there?", "answer": "There are none.\n#### 0"}])
    talk = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "How are you?"}]
    chats = [{"prompt_id": f"{n}", "prompt": "Hello.", "messages": talk, "score": n % 6} for n in range(60)]
    Path("ultrachat").mkdir()
    pandas.DataFrame(chats).to_parquet("ultrachat/train.parquet")
    mine = [{"question": f"{n} + 1", "solution": f"{n + 1}", "level": n % 3} for n in range(200)]
    pandas.DataFrame(mine).to_parquet("mine.parquet")
    run_page("prep")


def test_the_page_on_checkpoints_runs(folder: Path) -> None:
    write_rows("your-rows.jsonl", [{"prompt": f"{n} + 1", "completion": f"{n + 1}"} for n in range(20)])
    run("whet train quickstart --folder runs/NAME model.lora.rank=2")  # LoRA: the page exports an adapter, too
    calls, _ = blocks(ROOT / "docs/checkpoints.md", "python")
    exec(compile(calls, "checkpoints", "exec"), {})
    assert Path("my-adapter/adapter_config.json").is_file()
    for name in ("my-model", "my-gguf", "my-megatron"):
        shutil.rmtree(name)  # the commands do the same as the calls
    run_page("checkpoints", folder=folder)
    assert list(Path("my-gguf").glob("*.gguf"))


def test_getting_started_runs(folder: Path) -> None:
    save_tiny_model(Path("HuggingFaceTB/SmolLM2-360M-Instruct"))  # in place of the Hub's, as a folder with this name
    (recipe,) = blocks(ROOT / "docs/getting-started.md", "yaml")
    Path("gsm8k.yaml").write_text(recipe.replace("# path: gsm8k.jsonl", "path: gsm8k.jsonl"))  # without a network
    write_rows("gsm8k.jsonl", sums(1001))  # of which 500 are held out
    run_page("getting-started")
    assert Path("my-adapter/adapter_config.json").is_file()


def test_the_page_on_evaluation_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_BENCHMARKS", str(folder))
    write_rows("gsm8k.jsonl", sums(4))
    write_rows("mmlu-stem.jsonl", [{"question": "Which?", "options": ["this", "that"], "answer": "A"}])
    write_rows("ifeval.jsonl", [
        {"key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    ])  # fmt: skip
    save_tiny_model(Path("Qwen/Qwen3-0.6B"))  # in place of the Hub's, as a folder with this name
    run("whet train quickstart --folder runs/first")
    with chat_server(lambda body: "#### 1") as server:
        run_page("evaluation", server=server.url)
        assert len(server.seen) == 5


def test_the_page_on_pipelines_runs(folder: Path) -> None:
    run_page("pipelines")
