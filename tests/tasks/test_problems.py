"""Question-and-answer task sets: what is tested is never trained on, and wrong files say where they are wrong."""

import asyncio
import json
import logging
import pickle

import pytest

from whet.base.errors import ConfigError, DataError
from whet.config import SettingsError
from whet.tasks.math.arithmetic import Arithmetic, by_precedence
from whet.tasks.math.dataset import GSM8K, Math


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def gsm8k_rows(count, start=0):
    return [
        {"question": f"What is {i} plus 1?", "answer": f"It is {i + 1}.\n#### {i + 1:,}"} for i in range(start, count)
    ]


def questions(taskset, split):
    return [task.prompt[-1]["content"] for task in taskset.tasks(split)]


def every_taskset(folder):
    gsm8k = write(folder / "gsm8k.jsonl", gsm8k_rows(40))
    rows = [{"problem": f"Half of {i}?", "answer": f"\\frac{{{i}}}{{2}}", "difficulty": i % 5} for i in range(40)]
    return [
        GSM8K(path=gsm8k, test_size=10),
        Math(path=write(folder / "math.jsonl", rows), test_size=10),
        Arithmetic(train_size=50, test_size=10),
        Arithmetic(train_size=50, test_size=10, digits=1, terms=3, operations="+-*", stories=0.5),
    ]


def test_splits_never_overlap_uids_are_distinct_and_the_order_is_fixed(tmp_path):
    for taskset, same in zip(every_taskset(tmp_path), every_taskset(tmp_path), strict=True):
        train, test = questions(taskset, "train"), questions(taskset, "test")
        assert train
        assert len(test) == 10
        assert not set(train) & set(test)
        uids = [task.uid for split in ("train", "test") for task in taskset.tasks(split)]
        assert len(uids) == len(set(uids))
        assert questions(same, "train") == train
        assert taskset == same
        assert questions(pickle.loads(pickle.dumps(taskset)), "test") == test


def test_a_right_answer_is_worth_one_and_a_wrong_one_nothing(tmp_path):
    for taskset in every_taskset(tmp_path):
        environments = taskset.open()
        for task in taskset.tasks("train")[:5]:
            right = asyncio.run(environments.grade(task, f"\\boxed{{{task.data.answer}}}"))
            assert right == {"reward": 1, "correct": 1, "format": 1}
            assert asyncio.run(environments.grade(task, "\\boxed{123456789}"))["correct"] == 0
            assert asyncio.run(environments.grade(task, "no idea"))["format"] == 0
        asyncio.run(environments.close())


def test_held_out_problems_stay_the_same_when_rows_are_reordered(tmp_path):
    rows = gsm8k_rows(40)
    forward = GSM8K(path=write(tmp_path / "a.jsonl", rows), test_size=10)
    backward = GSM8K(path=write(tmp_path / "b.jsonl", rows[::-1]), test_size=10)
    assert set(questions(forward, "test")) == set(questions(backward, "test"))


def test_test_questions_and_duplicates_are_dropped_from_training_and_logged(tmp_path, caplog):
    rows = gsm8k_rows(20)
    again = {**rows[3], "question": rows[3]["question"].upper().replace(" ", "  ")}
    train = write(tmp_path / "train.jsonl", [*rows, again])
    test = write(tmp_path / "test.jsonl", rows[:5])
    with caplog.at_level(logging.INFO):
        taskset = GSM8K(path=train, test_path=test, test_size=4)
        assert len(taskset.tasks("train")) == 15
    assert len(taskset.tasks("test")) == 4
    assert not set(questions(taskset, "train")) & {q["question"] for q in rows[:5]}
    assert (
        "26 rows, 19 kept, dropped: 1 duplicate question, 5 also in the test split, 1 beyond test_size" in caplog.text
    )


def test_limit_and_prompt_shape_the_training_tasks(tmp_path):
    path = write(tmp_path / "rows.jsonl", gsm8k_rows(20))
    taskset = GSM8K(path=path, test_size=5, limit=3, prompt="Q: {question}", system="Be brief.")
    tasks = taskset.tasks("train")
    assert len(tasks) == 3
    assert [message["role"] for message in tasks[0].prompt] == ["system", "user"]
    assert tasks[0].prompt[1]["content"].startswith("Q: What is")
    with pytest.raises(SettingsError, match="question"):
        GSM8K(path=path, prompt="no place for it")
    with pytest.raises(DataError, match="validation"):
        taskset.tasks("validation")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "x"}', r"rows.jsonl:3: field 'answer' is missing"),
        ('{"question": "x", "answer": "5"}', r"rows.jsonl:3: field 'answer' must end in '#### '"),
        ('{"question": "x", "answer": "#### fivefold"}', r"rows.jsonl:3: field 'answer'"),
        ('{"question": 7, "answer": "#### 5"}', r"rows.jsonl:3: field 'question' must be a text"),
        ('{"question": " ", "answer": "#### 5"}', r"rows.jsonl:3: field 'question' must be a text"),
        ('{"question": ', r"rows.jsonl:3: not valid JSON"),
        ("[1, 2]", r"rows.jsonl:3: a row must be a JSON object, not list"),
    ],
)
def test_a_wrong_row_is_an_error_naming_file_line_and_field(tmp_path, line, says):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(gsm8k_rows(1)[0])
    path.write_text(f"{good}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=says):
        GSM8K(path=str(path), test_size=0).tasks("train")


def test_a_missing_or_empty_file_and_too_large_a_test_split_are_errors(tmp_path):
    with pytest.raises(DataError, match="can't read"):
        GSM8K(path=str(tmp_path / "nothing.jsonl")).tasks("train")
    with pytest.raises(DataError, match="no rows"):
        GSM8K(path=write(tmp_path / "empty.jsonl", [])).tasks("train")
    with pytest.raises(ConfigError, match="test_size=6"):
        GSM8K(path=write(tmp_path / "ten.jsonl", gsm8k_rows(10)), test_size=6).tasks("train")


def test_math_rows_are_filtered_by_difficulty_and_unanswered_ones_dropped(tmp_path, caplog):
    rows = [{"problem": f"p{i}", "answer": str(i), "difficulty": float(i)} for i in range(10)]
    rows += [{"problem": "open", "answer": None, "difficulty": 4}]
    path = write(tmp_path / "math.jsonl", rows)
    with caplog.at_level(logging.INFO):
        taskset = Math(path=path, test_size=0, min_difficulty=3.0, max_difficulty=6.0)
        assert [task.data.answer for task in taskset.tasks("train")] == ["3", "4", "5", "6"]
    assert "11 rows, 4 kept" in caplog.text
    with pytest.raises(SettingsError, match="min_difficulty"):
        Math(path=path, min_difficulty=5.0, max_difficulty=1.0)
    with pytest.raises(DataError, match="no row is left"):
        Math(path=path, test_size=0, min_difficulty=99.0).tasks("train")
    bare = write(tmp_path / "bare.jsonl", [{"problem": "p", "answer": "1"}])
    with pytest.raises(DataError, match=r"bare.jsonl:1: field 'difficulty' is missing"):
        Math(path=bare, test_size=0, min_difficulty=1.0).tasks("train")


@pytest.mark.parametrize("difficulty", ["9" * 400, "NaN", "1e999", "[1]"])
def test_a_difficulty_that_no_float_can_hold_is_an_error_naming_file_and_line(tmp_path, difficulty):
    path = tmp_path / "math.jsonl"
    path.write_text('{"problem": "p", "answer": "1", "difficulty": ' + difficulty + "}")
    with pytest.raises(DataError, match=r"math.jsonl:1: .*(finite number)"):
        Math(path=str(path), test_size=0).tasks("train")


def test_math_is_read_from_the_hub_too(monkeypatch):
    import datasets

    rows = [{"q": f"p{i}", "answer": str(i), "difficulty": None} for i in range(4)]
    published = {"train": datasets.Dataset.from_list(rows)}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split, **_: published[split])
    taskset = Math(path="hf:some/math:main:train", columns={"problem": "q"}, test_size=1)
    assert [task.data.answer for split in ("train", "test") for task in taskset.tasks(split)]
    with pytest.raises(DataError, match=r"some/math:main:train:1: field 'problem' is missing"):
        Math(path="hf:some/math:main:train").tasks("train")
    with pytest.raises(DataError, match="write hf:name:config:split"):
        Math(path="hf:some/math").tasks("train")
    with pytest.raises(DataError, match="can't be loaded from the Hugging Face Hub"):
        Math(path="hf:some/math:main:test").tasks("train")


DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


@pytest.mark.parametrize(
    ("row", "problem", "answer"),
    [
        (
            {"prompt": [{"content": DAPO.format("a\n\nb\n\nc")}], "reward_model": {"ground_truth": "34"}},
            "a\n\nb\n\nc",
            "34",
        ),
        ({"prompt": [{"content": "a\n\nb\n\nc"}], "reward_model": {"ground_truth": "34"}}, "a\n\nb\n\nc", "34"),
        ({"prompt": [{"content": "a"}], "reward_model": {"ground_truth": '["\\\\frac{1}{2}"]'}}, "a", "\\frac{1}{2}"),
        ({"question": "a", "expected_answer": 34}, "a", "34"),
        ({"problem": "a", "expected_answer": "34", "generated_solution": "so 34"}, "a", "34"),
        ({"prompt": "a", "solution": "34", "reward_model": {"ground_truth": "34"}}, "a", "34"),
        ({"problem": "a", "answer": 34}, "a", "34"),
        ({"problem": "a", "answer": 34.0}, "a", "34"),
        ({"problem": "a", "answer": ["34"]}, "a", "34"),
        ({"problem": "a", "solution": "It is $\\boxed{\\frac12}$.", "level": "Level 1"}, "a", "\\frac12"),
    ],
)
def test_rows_of_dapo_skywork_and_gym_lose_nothing_but_their_wrapping(tmp_path, row, problem, answer):
    task = Math(path=write(tmp_path / "math.jsonl", [row]), test_size=0, prompt="{question}").tasks("train")[0]
    assert (task.prompt[0]["content"], task.data.answer) == (problem, answer)


def test_columns_win_over_the_form_of_a_published_row(tmp_path):
    row = {"prompt": "a", "solution": "34", "reward_model": {"ground_truth": "1"}, "source_prompt": [{"content": "b"}]}
    path = write(tmp_path / "math.jsonl", [row])
    task = Math(path=path, test_size=0, columns={"problem": "prompt", "answer": "solution"}).tasks("train")[0]
    assert task.data.answer == "34"
    assert task.prompt[0]["content"].startswith("a\n")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"problem": "a", "answer": "He has <<1+1=2>>2.\n#### 2"}, "'answer' is a worked solution of GSM8K"),
        ({"problem": "a", "solution": "It is obvious."}, "no .*boxed"),
        ({"problem": "a", "answer": ["1", "2"]}, "'answer' must be one answer"),
        ({"problem": "a", "answer": True}, "'answer' must be a text"),
        ({"problem": "a", "answer": "$\\max$ at $x = 1$, min at $x = 2$"}, "prose or several formulas"),
    ],
)
def test_a_gold_answer_that_cannot_be_compared_is_an_error_of_its_row(tmp_path, row, says):
    with pytest.raises(DataError, match=says):
        Math(path=write(tmp_path / "math.jsonl", [row]), test_size=0).tasks("train")


def test_a_row_with_several_answers_is_an_error_naming_its_line(tmp_path):
    row = {"prompt": [{"content": "a"}], "reward_model": {"ground_truth": '["1", "2"]'}}
    with pytest.raises(DataError, match=r"math.jsonl:1: .*must hold one 'ground_truth'"):
        Math(path=write(tmp_path / "math.jsonl", [row]), test_size=0).tasks("train")


def test_math_tasks_keep_the_difficulty_that_is_a_number(tmp_path):
    rated = [{"difficulty": 2}, {"difficulty": "hard"}, {"difficulty": None}, {"difficulty": True}, {}]
    rows = [{"problem": f"p{i}", "answer": "1", **more} for i, more in enumerate(rated)]
    tasks = Math(path=write(tmp_path / "math.jsonl", rows), test_size=0).tasks("train")
    assert [task.data.difficulty for task in tasks] == [2.0, None, None, None, None]


def test_arithmetic_answers_are_the_value_of_the_term():
    for task in Arithmetic(operations="+-*", terms=4, digits=3, train_size=100, test_size=1).tasks("train"):
        words = task.prompt[-1]["content"].split("\n")[0].removeprefix("What is ").removesuffix("?").split()
        value = by_precedence([int(word) for word in words[::2]], words[1::2])
        assert str(value) == task.data.answer
    assert by_precedence([2, 3, 4, 5], ["+", "*", "-"]) == 2 + 3 * 4 - 5


def test_arithmetic_stories_never_go_below_nothing():
    tasks = Arithmetic(operations="+-*", terms=4, stories=1.0, train_size=200, test_size=1).tasks("train")
    assert all(int(task.data.answer) >= 0 for task in tasks)
    assert all("How many" in task.prompt[-1]["content"] for task in tasks)


def test_too_few_different_arithmetic_problems_are_an_error():
    with pytest.raises(ConfigError, match="different train tasks"):
        Arithmetic(operations="+", digits=1, train_size=500, test_size=10).tasks("train")
