"""The scripts in examples/: every row that goes in comes out or is counted, and no problem is in both splits."""

import ast
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_export_reward_model import make_run
from tests.forks import finished, script_fork
from tests.rows import rows_recipe
from tests.tiny import tiny_llama
from whet.chat.renderer import Renderer
from whet.checkpoint.export import export
from whet.metrics.rollout_file import RolloutRecord, write_rollouts
from whet.tasks.shell.repositories import Repositories, Repository
from whet.tasks.shell.toy_code import SAMPLES

ROOT = Path(__file__).parent.parent


def script(name: str, *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def problem(index: int, *right: bool) -> dict[str, Any]:
    names = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    given = {n: {"is_correct": r, "solution": f"{n} says {r}"} for n, r in zip(names, right, strict=True)}
    return {"question": f"Problem {index}?", "ground_truth": "A: 1", **given}


@pytest.fixture
def solutions(tmp_path: Path) -> Path:
    rows = [problem(i, True, i % 2 == 0, False, False) for i in range(60)]
    rows += [problem(60, True, True, True, True), problem(61, False, False, False, False)]
    rows[0]["6b_verification"]["solution"] = rows[0]["6b_finetuning"]["solution"]
    path = tmp_path / "solutions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_right_solutions_stand_above_wrong_ones_and_problems_are_split(solutions: Path, tmp_path: Path) -> None:
    done = script("gsm8k_pairs.py", solutions, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "248 solutions: 247 used, dropped: 1 that" in done.stdout
    assert "62 problems: 60 used, dropped: 1 with solutions that are all right, 1 with" in done.stdout
    train, test = read(tmp_path / "out" / "train.jsonl"), read(tmp_path / "out" / "test.jsonl")
    assert f"{len(train)} rows in train.jsonl, {len(test)} in test.jsonl" in done.stdout
    assert len(train) + len(test) == 30 * 4 + 30 * 3 - 2 * 1, "all right ones above all wrong ones, once"
    assert all("True" in row["chosen"] and "False" in row["rejected"] for row in train + test)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert train
    assert test


def test_every_solution_is_scored(solutions: Path, tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    done = script("gsm8k_pairs.py", solutions, tmp_path / "out", "--form", "scored")
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "out" / "train.jsonl") + read(tmp_path / "out" / "test.jsonl")
    assert len(rows) == 247
    assert all(row["score"] == ("True" in row["completion"]) for row in rows)
    algorithm = {"type": "reward_model", "loss": "score_regression"}
    recipe = rows_recipe(tiny_model, "scored", tmp_path / "out" / "train.jsonl", algorithm)
    renderer = Renderer(AutoTokenizer.from_pretrained(tiny_model))
    assert {group.episodes[0].reward for group in recipe.rows.groups(renderer, judging=True)["train"]} == {0.0, 1.0}


def test_a_file_of_another_kind_is_refused_with_its_line(solutions: Path, tmp_path: Path) -> None:
    solutions.write_text(json.dumps({"question": "x?", "answer": "1"}))
    done = script("gsm8k_pairs.py", solutions, tmp_path / "out")
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "solutions.jsonl:1: field '6b_finetuning' is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_rows_for_mini_swe_agent_repair_every_bug(tmp_path: Path) -> None:
    """tests/endpoint/test_mini_swe_agent.py compares their tokens with the agent's."""
    from examples.mini.repairs import repair

    done = script("mini/repairs.py", tmp_path / "new" / "rows.jsonl")
    assert done.returncode == 0, done.stderr
    assert [len(read(tmp_path / "new" / name)) for name in ("rows.jsonl", "rows-test.jsonl")] == [64, 24]
    shown: dict[str, Repository] = {}
    for task in Repositories(functions=2, train_size=100, test_size=1).tasks("train"):
        shown.setdefault(next(call.function for call in task.data.calls if call.fails), task.data)
    assert shown.keys() == SAMPLES.keys()
    for name, repository in shown.items():
        file = tmp_path / name / repository.path
        file.parent.mkdir()
        file.write_text(repository.before[repository.path])
        subprocess.run(["bash", "-c", repair(repository)], cwd=file.parent, check=True, timeout=60)
        assert file.read_text() == repository.repaired


def test_the_rows_for_mini_swe_agent_need_the_name_of_a_file() -> None:
    assert "usage: " in script("mini/repairs.py").stderr


def record(task: str, answer: str, correct: float, status: str = "completed", parts: bool = False) -> RolloutRecord:
    said = [{"type": "text", "text": answer}] if parts else answer
    talk = [{"role": "user", "content": f"ask {task}"}, {"role": "assistant", "content": said}]
    return RolloutRecord(
        step=1, uid=f"1:{task}", task=task, sample=0, prompt="", answer=answer, messages=talk, reward=correct,
        scores={"correct": correct}, status=status,
    )  # fmt: skip


def test_answers_of_a_run_become_pairs_texts_or_scored_rows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_rollouts(
        run, 1, [record("a", "1", 1), record("a", "2", 0), record("a", "3", 0), record("a", "2", 0, parts=True)]
    )
    write_rollouts(
        run, 2, [record("a", "4", 1), record("b", "5", 1), record("b", " ", 0), record("b", "6", 0, "failed")]
    )
    write_rollouts(run, 3, [record("c", text, float(text == "7")) for text in "789"])
    found = {}
    for form, account in {
        "pairs": "11 answers to 3 tasks: 7 used, dropped: 1 empty, 1 failed, 1 given before, 1 without a counterpart",
        "texts": "11 answers to 3 tasks: 4 used, dropped: 1 empty, 1 failed, 1 given before, 4 wrong",
        "scored": "11 answers to 3 tasks: 8 used, dropped: 1 empty, 1 failed, 1 given before",
    }.items():
        done = script("rollouts_to_rows.py", run, tmp_path / f"{form}.jsonl", "--form", form)
        assert done.returncode == 0, done.stderr
        assert account in done.stdout
        found[form] = read(tmp_path / f"{form}.jsonl")
    pairs = [(row["prompt"][0]["content"][-1], row["chosen"], row["rejected"]) for row in found["pairs"]]
    assert len(pairs) == 4
    assert {chosen for task, chosen, _ in pairs if task == "a"} == {"1", "4"}
    assert {rejected for task, _, rejected in pairs if task == "a"} == {"2", "3"}
    assert {pair for pair in pairs if pair[0] == "c"} == {("c", "7", "8"), ("c", "7", "9")}
    assert [row["completion"] for row in found["texts"]] == ["1", "4", "5", "7"]
    scores = {row["completion"]: row["score"] for row in found["scored"]}
    assert scores == {"1": 1, "2": 0, "3": 0, "4": 1, "5": 1, "7": 1, "8": 0, "9": 0}


def test_a_folder_without_rollouts_is_refused(tmp_path: Path) -> None:
    done = script("rollouts_to_rows.py", tmp_path, tmp_path / "out.jsonl")
    assert (done.returncode, done.stderr.startswith(f"error: {tmp_path} recorded no rollouts")) == (1, True)
    done = script("rollouts_to_rows.py", tmp_path / "none", tmp_path / "out.jsonl")
    assert (done.returncode, done.stderr.startswith(f"error: {tmp_path / 'none'} is not a folder")) == (1, True)


def test_a_call_of_a_tool_that_nobody_declared_is_rejected_and_declared_tools_stand_in_the_row(tmp_path: Path) -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    asked = {"role": "user", "content": "1 + 1?"}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    used = [asked, calls, {"role": "tool", "name": "add", "content": "2"}, {"role": "assistant", "content": "2"}]
    lines = [record("alone", "search('1 + 1')\n2", 1), record("alone", "2", 1)]
    lines += [record("tools", "", 1), record("tools", "3", 0)]
    lines[2].messages, lines[2].tools = used, tools
    lines[3].messages, lines[3].tools = [asked, {"role": "assistant", "content": "3"}], tools
    write_rollouts(tmp_path / "run", 1, lines)
    done = script("rollouts_to_rows.py", tmp_path / "run", tmp_path / "pairs.jsonl")
    assert done.returncode == 0, done.stderr
    alone, told = read(tmp_path / "pairs.jsonl")
    assert (alone["chosen"], alone["rejected"]) == ("2", "search('1 + 1')\n2")
    assert "tools" not in alone
    assert (told["prompt"], told["tools"], told["chosen"], told["rejected"]) == ([asked], tools, used[1:], "3")


SMALL = (
    "steps=1",
    "sampling.max_new_tokens=8",
    "sampling.max_prompt_tokens=1024",
    "evaluation.limit=2",
    "rollouts.prompts_per_step=2",
    "checkpoints.every=0",
    "learner.precision=float32",
    "generator.dtype=float32",
)


@pytest.mark.parametrize(("name", "printed"), [("grpo_loop.py", "accuracy "), ("own_loss.py", "best answers ")])
def test_a_custom_loop_runs(name: str, printed: str, tiny_model: Path, tmp_path: Path) -> None:
    assert printed in loop(tmp_path, name, f"model={tiny_model}", *SMALL)
    (run,) = (tmp_path / "runs").iterdir()
    assert [line["step"] for line in read(run / "metrics.jsonl") if "loss" in line] == [1]
    assert (run / "report.html").exists()


@pytest.mark.slow
def test_the_best_answers_by_a_reward_model_become_rows(tiny_model: Path, tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, tiny_llama(max_position_embeddings=1024))
    export(run, tmp_path / "judge")
    printed = loop(tmp_path, "best_of_n.py", tmp_path / "judge", f"model={tiny_model}", *SMALL)
    assert "accuracy of the best of 8: 0.0%" in printed
    assert [set(row) for row in read(tmp_path / "best.jsonl")] == [{"prompt", "completion"}] * 2


def loop(folder: Path, name: str, *words: Any) -> str:
    """Return what an example prints that ends well in the folder."""
    done = finished(script_fork(ROOT / "examples" / name, *map(str, words), folder=folder), 300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_notebook_runs(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, as a kernel does: inside of a running event loop, in one namespace."""
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "it is kept without outputs"
    settings = ", ".join(f"{word!r}" for word in SMALL)
    cells[0] = cells[0].replace('"smollm2-135m-instruct"', repr(str(tiny_model))).replace("steps=5, ", "")
    cells[0] = cells[0].replace(", max_new_tokens=24", "").replace("whet.train(", f"whet.train({settings}, ")
    cells[-1] = cells[-1].replace('"evaluation.limit=20"', f"'model={tiny_model}', {settings}")
    cells[-1] = cells[-1].replace("(1, 4)", "(1, 2)")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}

    async def kernel() -> list[Any]:
        values = []
        for cell in cells:
            *before, last = ast.parse(cell).body
            ends_in_value = isinstance(last, ast.Expr)
            exec(compile(ast.Module(before if ends_in_value else [*before, last], []), "cell", "exec"), names)
            values.append(eval(compile(ast.unparse(last), "cell", "eval"), names) if ends_in_value else None)
        return values

    values = asyncio.run(kernel())
    assert len(values[1]) == 1, "a mean reward for each step"
    assert "<iframe" in values[2]._repr_html_()
    assert len(list((tmp_path / "runs").iterdir())) == 2
