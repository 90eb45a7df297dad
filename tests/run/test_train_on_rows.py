"""``whet.train``: a model, rows and a function; and the result of a run."""

import asyncio
import json
import os
from pathlib import Path

import pytest

import whet
from tests.toy import toy_recipe
from whet.base.errors import ConfigError, DataError
from whet.config import RecipeError
from whet.core.types import Task
from whet.run.result import Result
from whet.tasks.functions import FunctionTasks, name_of, write_rows

ROWS = [{"prompt": f"Write {n} letters.", "letters": n} for n in range(2, 22)]
SMALL = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 8}


def lowercase(text: str, letters: int) -> float:
    return sum("a" <= letter <= "z" for letter in text) / letters


async def scored(text: str, row: dict) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"reward": len(text) / row["letters"], "correct": 1.0}


def graded(function, said: str = "abc", **columns):
    name, _ = name_of(function)
    task = Task("t", [{"role": "user", "content": "q"}], columns)
    return asyncio.run(FunctionTasks(path="x", reward=name).grade(task, said))


def test_rows_and_a_function_make_a_run(tiny_model: Path, tmp_path: Path) -> None:
    result = whet.train(model=str(tiny_model), data=ROWS, reward=lowercase, steps=2, folder=tmp_path / "run", **SMALL)
    assert [line["step"] for line in result.metrics] == [1, 2]
    assert [line["step"] for line in result.evaluations] == [0, 2]
    assert result.evaluations[0]["evaluation/n"] == 2, "a tenth of the rows is held out"
    assert result.report == tmp_path / "run" / "report.html" == result / "report.html"
    assert "<iframe" in result._repr_html_()
    assert os.fspath(result) == str(tmp_path / "run")
    assert list(result.table().index) == [1, 2]
    assert result.model().config.vocab_size >= len(result.tokenizer())
    assert result.evaluate(limit=1).n == 1
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


def test_the_first_parameter_is_the_models_text_and_others_are_columns() -> None:
    assert graded(lambda text: len(text)) == 3
    assert graded(lambda answer, row: row["n"] + len(answer), n=2) == 5
    assert graded(lambda said, n, scale=10: n * scale, n=2) == 20
    assert graded(lambda text, answer: text == answer, answer="abc") is True
    assert graded(lambda text, prompt: prompt[0]["content"]) == "q"
    with pytest.raises(ConfigError, match="has the parameter 'level', which is neither 'row' nor a column"):
        graded(lambda text, level: 0)
    with pytest.raises(ConfigError, match="has no parameter for the model's text"):
        graded(lambda: 0)


def test_mistakes_are_named(tmp_path: Path) -> None:
    given = {"model": "smollm2-135m-instruct", "data": ROWS, "reward": lowercase, "folder": tmp_path / "run"}
    with pytest.raises(DataError, match=r"row 1 of data has no 'prompt'; it has: question"):
        whet.train(**given | {"data": [ROWS[0], {"question": "?"}]})
    with pytest.raises(DataError, match="row 0 of data is str; it must be a dict"):
        whet.train(**given | {"data": ["What is 2 + 2?"]})
    with pytest.raises(DataError, match="data has no rows"):
        whet.train(**given | {"data": []})
    with pytest.raises(ConfigError, match="reward is 3; it must be a function"):
        whet.train(**given | {"reward": 3})
    with pytest.raises(RecipeError, match="group_sise"):
        whet.train("algorithm.group_sise=4", **given)
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        asyncio.run(FunctionTasks(path="x", reward="nowhere:reward").grade(Task("t", []), "a"))
    assert not (tmp_path / "run").exists(), "nothing is left of what could not begin"


def test_values_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    assert write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "n": numpy.int64(3), "v": numpy.ones(2)}]) == 1
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {"prompt": "p", "n": 3, "v": [1.0, 1.0]}
    with pytest.raises(DataError, match=r"row 0 of data: .* is not a value of JSON"):
        write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "n": object()}])


def test_an_earlier_run_is_seen_by_its_folder(tiny_model: Path, tmp_path: Path) -> None:
    result = whet.start(toy_recipe(tiny_model, steps=1), folder=tmp_path / "run")
    again = Result(tmp_path / "run")
    assert again == result
    assert again.metrics == result.metrics
    assert again.recipe.steps == 1
    assert "has no report" in Result(tmp_path / "nowhere")._repr_html_()
