"""``whet.train``: a model, rows and a function; and the result of a run."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from functools import partial, reduce
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

import whet
from tests.toy import toy_recipe
from whet.algorithms.grpo import GRPO
from whet.base.errors import ConfigError, DataError, WhetError
from whet.base.progress import PROGRESS
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.store import CheckpointStore
from whet.config import RecipeError
from whet.core.types import Task
from whet.data.in_memory import as_rows, write_rows
from whet.run.from_rows import RowFiles
from whet.show.result import Result
from whet.tasks.episodes import graded as tasks_graded
from whet.tasks.functions import FunctionTasks, name_of
from whet.tasks.prompts import Prompts

ROWS = [{"prompt": f"Write {n} letters.", "letters": n} for n in range(2, 22)]
SMALL = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 8}


ITSELF: list[object] = []
ITSELF.append(ITSELF)


def lowercase(text: str, letters: int) -> float:
    return sum("a" <= letter <= "z" for letter in text) / letters


def yielding(text: str) -> Iterator[float]:
    yield 1.0


async def scored(text: str, row: dict) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"reward": len(text) / row["letters"], "correct": 1.0}


def graded(function, said: str = "abc", **columns):
    task = Task("t", [{"role": "user", "content": "q"}], columns)
    return asyncio.run(FunctionTasks(path="x", reward=name_of(function)).grade(task, said))


def test_rows_and_a_function_make_a_run(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = whet.train(model=str(tiny_model), data=ROWS, reward=lowercase, steps=2, folder=tmp_path / "run", **SMALL)
    assert capsys.readouterr().err.count("evaluation/accuracy is the share of rewards above 0") == 1
    assert CheckpointStore(tmp_path / "run/checkpoints", CheckpointConfig(best_metric="evaluation/reward")).best() == 2
    assert [line["step"] for line in result.metrics] == [1, 2]
    assert [line["step"] for line in result.evaluations] == [0, 2]
    assert result.evaluations[0]["evaluation/n"] == 2, "a tenth of the rows is held out"
    assert result.report == tmp_path / "run" / "report.html" == result / "report.html"
    assert "<iframe" in result._repr_html_()
    assert os.fspath(result) == str(tmp_path / "run")
    assert list(result.table().index) == [1, 2]
    assert result.model().config.vocab_size >= len(result.tokenizer())
    report = result.evaluate(limit=1)
    assert report.n == 1  # type: ignore[union-attr]
    assert "Trajectory" not in repr(report)
    assert whet.resume(result, "steps=3").metrics[-1]["step"] == 3


@pytest.mark.parametrize("kind", ["dataset", "frame", "file"])
def test_data_may_be_of_any_usual_kind(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    if kind == "file":
        data = tmp_path / "mine.jsonl"
        data.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind == "frame":
        data = pytest.importorskip("pandas", reason="not a dependency").DataFrame(ROWS)
    else:
        data = pytest.importorskip("datasets", reason="an extra").Dataset.from_list(ROWS)
    settings = {**SMALL, "evaluation": {"enabled": False}, "checkpoints": {"every": 0}}
    given = {"model": str(tiny_model), "data": data, "reward": scored, "folder": tmp_path / "run"}
    result = whet.train("data.test_size=4", steps=1, **given, **settings)
    assert result.metrics[0]["accuracy"] == 1


def test_the_progress_of_updates_is_that_of_learning(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, begin = list[str](), PROGRESS.begin
    monkeypatch.setattr(PROGRESS, "begin", lambda activity: (shown.append(activity), begin(activity)))
    settings = {**SMALL, "evaluation": {"enabled": False}, "checkpoints": {"every": 0}}
    whet.train(model=tiny_model, data=ROWS, reward=lowercase, steps=1, folder=tmp_path / "run", **settings)
    first = shown.index("sampling")
    assert shown[first:][:5] == [
        "sampling", "learning", "computing log-probs", "learning", "publishing the weights",
    ]  # fmt: skip


@pytest.mark.parametrize(("steps", "why"), [(-1, "steps: expected at least 0, got the number -1"), (0, "set steps")])
def test_a_wrong_argument_is_named_as_one(tiny_model: Path, tmp_path: Path, steps: int, why: str) -> None:
    with pytest.raises(RecipeError, match=f"^the arguments of whet.train: {why}"):
        whet.train(model=tiny_model, data=ROWS, reward=lowercase, steps=steps, folder=tmp_path / "run", **SMALL)


def test_the_first_parameter_is_the_models_answer_and_others_are_columns() -> None:
    assert graded(lambda text: len(text)) == 3
    assert graded(lambda answer, row: row["n"] + len(answer), n=2) == 5
    assert graded(lambda said, n, scale=10: n * scale, n=2) == 20
    assert graded(lambda said, scale=10: scale, scale=2) == 2, "a column with the name of a default wins"
    assert graded(lambda text, answer: text == answer, answer="abc") is True
    assert graded(lambda text, prompt: prompt[0]["content"]) == "q"
    assert graded(lambda prompt, answer: answer + prompt, "abc", prompt="q") == "abcq"
    assert graded(lambda row, answer: answer + row["answer"], answer="d") == "abcd"
    assert graded(lambda *, n, answer: answer * n, n=2) == "abcabc"
    assert graded(lambda answer, /, **row: sorted(row), n=2) == ["n", "prompt"]
    assert graded(len) == 3
    assert graded("abcabc".count) == 2
    assert graded(partial(lowercase, letters=6)) == 0.5
    with pytest.raises(ConfigError, match="has the parameter 'level', which is neither 'row' nor a column of t;"):
        graded(lambda text, level: 0)
    with pytest.raises(ConfigError, match="has no parameter for the model's answer"):
        graded(lambda: 0)
    with pytest.raises(ConfigError, match="call one of its parameters 'answer'"):
        graded(lambda text: 0, text="a column")


def test_a_row_of_messages_is_a_prompt_and_its_last_reply(tmp_path: Path) -> None:
    file = tmp_path / "prepared.jsonl"
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    asked = [{"role": "user", "content": "3 + 3?"}]
    alpaca = {"instruction": "5 + 5?", "output": "10"}
    write_rows(file, [("", {"messages": turns, "source": "sums"}), ("", {"prompt": asked}), ("", alpaca)])
    data = FunctionTasks(path=str(file), test_size=0, reward=name_of(lambda answer, completion: answer == completion))
    first, second, third = Prompts.splits(data)["train"]
    assert (first.prompt, first.data["completion"], first.data["source"]) == (turns[:1], "4", "sums")
    assert (second.prompt, "completion" in second.data) == (asked, False)
    assert (third.prompt[0]["content"], third.data["completion"]) == ("5 + 5?", "10")
    assert asyncio.run(data.grade(first, "4")) is True


def test_functions_are_found_by_name_where_they_can_be_imported() -> None:
    assert name_of(lowercase) == "tests.run.test_train_on_rows:lowercase"
    first, second = (lambda text: 1), (lambda text: 2)
    assert name_of(first) == name_of(first) != name_of(second)
    assert "can't find it" in FunctionTasks(path="x", reward=name_of(first)).warnings()[0]
    assert not FunctionTasks(path="x", reward=name_of(lowercase)).warnings()
    with pytest.raises(ConfigError, match="only the process that defined it can call it"):
        asyncio.run(FunctionTasks(path="x", reward="__main__:elsewhere").grade(Task("t", []), "a"))


def test_a_reward_function_is_inspected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", as_rows(ROWS, "data"))
    data, inspected = FunctionTasks(path=str(tmp_path / "rows.jsonl"), test_size=0, reward=name_of(lowercase)), []
    monkeypatch.setattr("inspect.signature", lambda function: inspected.append(function) or signature(function))
    assert len(data.tasks("train")) == len(ROWS)
    assert inspected == [lowercase]


@pytest.mark.parametrize("value", [float("nan"), None, "good", [1.0]])
def test_a_reward_that_is_no_number_is_blamed_on_the_function(value: object) -> None:
    def wrong(text: str) -> object:
        return value

    data = FunctionTasks(path="x", reward=name_of(wrong))
    place = rf"the reward function wrong \({Path(__file__)}:\d+\) of task 't' is {re.escape(repr(value))}"
    with pytest.raises(DataError, match=f"the reward returned by {place}; it must be a finite number"):
        asyncio.run(tasks_graded(data, Task("t", []), "an answer"))


@pytest.mark.parametrize(
    ("override", "settings", "problem"),
    [
        ("optimizer.lr=1e-4", {"lr": 1e-5}, "lr= and 'optimizer.lr=1e-4' both set optimizer.lr"),
        ("optimizer={lr: 1e-4}", {"lr": 1e-5}, "lr= and 'optimizer={lr: 1e-4}' both set optimizer.lr"),
        ("epochs=2", {"steps": 3}, "steps= and 'epochs=2' both set steps"),
        ("steps=2", {"epochs": 3}, "epochs= and 'steps=2' both set steps"),
        ("model.path=x", {}, "model= and 'model.path=x' both set model.path"),
        ("seed=2", {"optimizer": {"lr": 1e-4}, "lr": 1e-5}, "optimizer= and lr= both set optimizer.lr"),
    ],
)
def test_a_setting_that_is_given_twice_is_an_error(
    override: str, settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(problem)}; leave one out$"):
        whet.train(override, model="no model", data=ROWS, reward=lowercase, folder=tmp_path / "run", **settings)


def test_an_argument_and_an_override_may_set_parts_of_a_section(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sampling": {"temperature": 0.5}, "lr": 1e-5}
    overrides = ("sampling={top_p: 0.9}", "optimizer.warmup_steps=1", "seed=1", "seed=2")
    with pytest.raises(WhetError, match="model 'no model': there is no such folder"):
        whet.train(*overrides, model="no model", data=ROWS, reward=lowercase, folder=tmp_path / "run", **settings)


def test_mistakes_are_named(tmp_path: Path) -> None:
    given = {"model": "smollm2-135m-instruct", "data": ROWS, "reward": lowercase, "folder": tmp_path / "run"}
    with pytest.raises(DataError, match=r"row 1 of data: field 'prompt' is missing \(fields of this row: question"):
        whet.train(**given | {"data": [ROWS[0], {"question": "?"}]})
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'prompt' is missing .*`whet prep` leaves out"):
        whet.train(**given | {"data": tmp_path / "rows.jsonl"})
    with pytest.raises(DataError, match="row 0 of test: field 'prompt' must be a text or a list of messages"):
        whet.train(**given | {"test": [{"prompt": 3}]})
    with pytest.raises(DataError, match=r"row 0 of data: field 'prompt\[0\]' must have the role 'user' in place"):
        whet.train(**given | {"data": [{"prompt": ({"role": "usr", "content": "?"},)}]})
    with pytest.raises(DataError, match="row 1 of data has a value that contains itself"):
        whet.train(**given | {"data": [ROWS[0], {"prompt": "?", "itself": ITSELF}]})
    deep = reduce(lambda inner, _: [inner], range(200), "?")
    with pytest.raises(DataError, match="row 0 of data: it is nested too deeply, in more than 100 levels"):
        whet.train(**given | {"data": [{"prompt": "?", "deep": deep}]})
    with pytest.raises(DataError, match="row 0 of data is a str; it must be a dict"):
        whet.train(**given | {"data": ["What is 2 + 2?"]})
    with pytest.raises(DataError, match="data is a dict; it must be a list of dicts"):
        whet.train(**given | {"data": {"prompt": ["What is 2 + 2?"]}})
    with pytest.raises(ConfigError, match="evaluation: fewer than ten rows, so none is held out to evaluate on"):
        whet.train(**given | {"data": ROWS[:5], "test": None, "evaluation": {"every": 1}})
    with pytest.raises(DataError, match="data has no rows"):
        whet.train(**given | {"data": []})
    with pytest.raises(ConfigError, match="reward is 3; it must be a function"):
        whet.train(**given | {"reward": 3})
    with pytest.raises(ConfigError, match=r"whet\.train needs a reward"):
        whet.train(**given | {"reward": None})
    with pytest.raises(RecipeError, match="group_sise"):
        whet.train("algorithm.group_sise=4", **given)
    with pytest.raises(RecipeError, match=r"Did you mean 'optimizer\.lr'|optimizer\.lr"):
        whet.train(**given, learning_rate=1e-5)
    with pytest.raises(RecipeError, match="algorithm is given as a value, which replaces the section"):
        whet.train(**given, algorithm=GRPO(), group_size=4)
    with pytest.raises(ConfigError, match="steps= and epochs= both set steps; leave one out"):
        whet.train(**given, steps=5, epochs=2)
    with pytest.raises(ConfigError, match=r"model is a dict; it must be a folder, .*'model\.lora\.rank=16', in front"):
        whet.train(**given | {"model": {"path": "x", "lora": {"rank": 16}}})
    splits = DatasetDict({"train": Dataset.from_list(ROWS)})
    with pytest.raises(DataError, match=r"data is a DatasetDict; .*; give one of its splits, as in data\['train'\]"):
        whet.train(**given | {"data": splits})
    with pytest.raises(RecipeError, match="algorithm = sft does not have it; it is a setting of algorithm = grpo"):
        whet.train(**given | {"data": [row | {"completion": "a"} for row in ROWS], "reward": None}, group_size=4)
    with pytest.raises(ConfigError, match=r"the reward function yielding \(.*:\d+\) contains `yield`"):
        whet.train(**given | {"reward": yielding})
    with pytest.raises(ConfigError, match=r"data\.reward: yielding .* contains `yield`"):
        FunctionTasks(path="not there", reward=f"{__name__}:yielding").tasks("train")
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        asyncio.run(FunctionTasks(path="x", reward="nowhere:reward").grade(Task("t", []), "a"))
    with pytest.raises(ConfigError, match=r"test_train_on_rows .* has no 'lowercas'.*Did you mean 'lowercase'"):
        FunctionTasks(path="not there", reward=f"{__name__}:lowercas").tasks("train")
    with pytest.raises(ConfigError, match=r"'my_rewards\.py' names a file; name what it holds, as in my_"):
        FunctionTasks(path="not there", reward="my_rewards.py").tasks("train")
    with pytest.raises(ConfigError, match=r"there is no file .*; set data\.reward=FILE\.py:FUNCTION"):
        FunctionTasks(path="not there", reward="your_rewards.py:reward").tasks("train")
    assert not (tmp_path / "run").exists(), "nothing is left of what could not begin"


def test_a_reward_that_raises_is_reported_once_with_its_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(answer: str) -> float:
        return answer.nope  # type: ignore[attr-defined]

    with pytest.raises(WhetError, match=r"(?s)test_train_on_rows\.py.*answer\.nope.*AttributeError") as caught:
        whet.train(model=tiny_model, data=ROWS, reward=broken, steps=1, folder=tmp_path / "run", **SMALL)
    said = capsys.readouterr().err + str(caught.value)
    assert said.count("AttributeError: 'str' object has no attribute 'nope'") == 1


def test_rows_of_answers_need_no_reward(tiny_model: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.csv"
    said.write_text("prompt,completion\n" + "".join(f"{n}?,abc\n" for n in range(12)))
    result = whet.train(model=tiny_model, data=said, steps=1, batch_size=2, folder=tmp_path / "sft")
    assert result.recipe.algorithm.__class__.__name__ == "SFT"
    assert result.evaluate()["evaluation/n"] == 1  # type: ignore[index]
    pairs = [{"prompt": f"{n}?", "chosen": "abc", "rejected": "ABC"} for n in range(4)]
    result = whet.train(model=tiny_model, data=pairs, steps=1, batch_size=2, folder=tmp_path / "dpo")
    assert result.recipe.algorithm.__class__.__name__ == "DPO"
    with pytest.raises(ConfigError, match="evaluate\\(\\) has no setting 'samples' here; it has: limit, split"):
        result.evaluate(samples=3)


def test_rows_with_a_label_of_good_or_bad_are_not_all_imitated(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "completion": "a", "label": number % 2 == 0} for number in range(4)]
    result = whet.train(model=tiny_model, data=rows, steps=1, batch_size=2, folder=tmp_path / "kto")
    assert result.recipe.algorithm.__class__.__name__ == "KTO"
    table = tmp_path / "rows.csv"
    table.write_text("prompt,completion,label\nq,a,True\nq,b,False\n")
    assert RowFiles(table, None, None).training.algorithm == "kto"
    assert RowFiles([{"prompt": "q", "completion": "a", "label": "spam"}], None, None).training.algorithm == "sft"
    numbered = [{"prompt": "q", "completion": "a", "label": label} for label in (None, 0)]
    with pytest.raises(ConfigError, match=r"data has a 'label' 0: write true for a good answer .* leave"):
        RowFiles(numbered, None, None)


def test_all_given_test_rows_are_evaluated_and_equal_prompts_are_one_task(tmp_path: Path) -> None:
    many = [{"prompt": f"{n}?"} for n in range(150)]
    assert RowFiles(ROWS, many, lowercase).recipe(tmp_path)["data"]["test_size"] == 150
    assert RowFiles(many, None, lowercase).recipe(tmp_path)["data"]["test_size"] == 15
    alike = RowFiles([{"prompt": "Write a joke."}] * 40, None, lowercase).recipe(tmp_path)
    assert alike["data"]["test_size"] == 0, "one task can't be held out"
    assert alike["evaluation"] == {"enabled": False}


def test_published_forms_of_conversations_are_recognized() -> None:
    turns = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    assert RowFiles([{"conversations": turns}], None, None).training.algorithm == "sft"


def test_a_callback_gets_each_step_and_its_exception_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    steps = []

    async def on_step(step: int, metrics: dict) -> None:
        await asyncio.sleep(0)
        steps.append((step, metrics["reward/mean"], "evaluation/accuracy" in metrics, "time/step" in metrics))

    given = {"model": tiny_model, "data": ROWS, "reward": lowercase}
    result = whet.train(**given, steps=2, folder=tmp_path / "run", on_step=on_step, **SMALL)
    rewards = [line["reward/mean"] for line in result.metrics]
    assert steps == [(1, rewards[0], False, True), (2, rewards[1], True, True)]
    whet.resume(result, "steps=3", on_step=on_step)
    assert [step for step, *_ in steps] == [1, 2, 3]

    def failing(step: int, metrics: dict) -> None:
        raise LookupError(f"nothing at {step}")

    with pytest.raises(LookupError, match="nothing at 1") as caught:
        whet.train(**given, steps=2, folder=tmp_path / "other", on_step=failing, **SMALL)
    assert "on_step raised this after step 1" in caught.value.__notes__[0]
    files = [entry.path.name for entry in caught.traceback]
    assert files[-1] == "test_train_on_rows.py"
    assert set(files) == {"test_train_on_rows.py", "api.py"}, "the lines between are left out"


def test_a_run_is_evaluated_in_a_notebook(tiny_model: Path, tmp_path: Path) -> None:
    result = whet.start(toy_recipe(tiny_model, steps=1, evaluation={"limit": 2}), folder=tmp_path / "run")

    async def cell() -> int:
        return result.evaluate(samples=2, temperature=1.0).samples  # type: ignore[union-attr]

    assert asyncio.run(cell()) == 2


def test_values_of_numpy_and_missing_cells_are_written(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "rows.jsonl"
    write_rows(path, as_rows([{"prompt": "p", "n": numpy.int64(3), "v": numpy.ones(2)}]))
    assert json.loads(path.read_text()) == {"prompt": "p", "n": 3, "v": [1.0, 1.0]}
    frame = pytest.importorskip("pandas", reason="not a dependency").DataFrame({"prompt": ["p", "q"], "n": [1.5, None]})
    assert [row["n"] for _, row in as_rows(frame)] == [1.5, None]
    with pytest.raises(DataError, match=r"row 0 of data: .* is not a value of JSON"):
        write_rows(path, as_rows([{"prompt": "p", "n": object()}]))
    with pytest.raises(DataError, match="row 0 of data: column 'n': it has a number that is not finite"):
        write_rows(path, as_rows([{"prompt": "p", "n": float("nan")}]))


def test_an_earlier_run_is_seen_by_its_folder(tiny_model: Path, tmp_path: Path) -> None:
    result = whet.start(toy_recipe(tiny_model, steps=1), folder=tmp_path / "run")
    again = whet.result(tmp_path / "run")
    assert again == result
    assert again.metrics == result.metrics
    assert again.recipe.steps == 1
    assert Path(again) == tmp_path / "run"
    assert "has no report" in Result(tmp_path / "nowhere")._repr_html_()
    with pytest.raises(ConfigError, match="is not a run folder"):
        whet.result(tmp_path)


def test_a_value_that_no_file_can_hold_is_named_with_its_column(tmp_path: Path) -> None:
    for value, why in (
        (float("nan"), "it has a number that is not finite: use None"),
        ({1, 2}, "a value of type set is not a value of JSON"),
        (b"abc", "not an image in one of the formats"),
    ):
        with pytest.raises(DataError, match=f"row 0 of data: column 'mine': {why}"):
            write_rows(tmp_path / "rows.jsonl", as_rows([{"prompt": "x", "mine": value}]))


def test_columns_of_a_table_have_separate_names() -> None:
    pandas = pytest.importorskip("pandas", reason="not a dependency")
    for table in (pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), pandas.DataFrame([["a", "b"]])):
        with pytest.raises(DataError, match="each needs its own name, a text"):
            as_rows(table)
