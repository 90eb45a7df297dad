"""An answer chooses one of the options, or none; rows of other projects load unchanged."""

import asyncio
import json
from collections import Counter

import pytest

from tests.cpu_time import cpu_seconds_below
from whet.base.errors import DataError
from whet.core.content import text_of
from whet.tasks.choice.grader import chosen
from whet.tasks.choice.task_set import MultipleChoice

COLOURS = {"A": "red", "B": "blue", "C": "Light Blue", "D": "E. coli", "E": "none of the above"}
GYM_PATTERN = "Option Selected:\\s*([A-Za-z])\\s*"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def one_task(path, row, **settings):
    return MultipleChoice(path=write(path / "rows.jsonl", row), test_size=0, **settings).tasks("train")[0]


def grade(taskset, task, answer):
    return asyncio.run(taskset.grade(task, answer))


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("\\boxed{B}", "B"),
        ("no \\boxed{A}, yes \\boxed{B}", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{\\textbf{\\text{ (B) }}}", "B"),
        ("\\boxed{B: blue}", "B"),
        ("\\boxed{B — blue}", "B"),
        ("\\boxed{\\textcolor{red}{B}}", "B"),
        ("\\boxed{B) Blue.}", "B"),
        ("\\boxed{B. because the sky is}", "B"),
        ("\\boxed{D: E. coli}", "D"),
        ("\\boxed{Option B}", "B"),
        ("\\boxed{\\textrm{B}}", "B"),
        ("\\boxed{\\mathsf{B}}", "B"),
        ("\\boxed{{\\bf B}}", "B"),
        ("\\boxed{B\\text{ (blue)}}", "B"),
        ("\\boxed{B\\text{ (red)}}", None),
        ("\\boxed {B}", "B"),
        ("\\boxed B", "B"),
        ("\\boxed{Options A and B}", None),
        ("\\boxed{B", None),
        ("\\boxed{}", None),
        ("B", None),
        ("\\boxed{b}", None),
        ("\\boxed{blue}", None),
        ("\\boxed{F}", None),
        ("\\boxed{A, B}", None),
        ("\\boxed{A/B/C/D/E}", None),
        ("\\boxed{ABCDE}", None),
        ("\\boxed{B: A}", None),
        ("\\boxed{B: red}", None),
        ("\\boxed{E. coli}", None),
        ("\\boxed{B} no \\boxed{I don't know}", None),
        ("\\boxed{B\x00}", "B"),
        ("\\boxed{B \\quad \\text{blue}}", "B"),
        ("\\boxed{B red}", None),
        ("\\boxed{B, blue}", "B"),
        ("\\boxed{B, red}", None),
        ("\\boxed{B, or red}", None),
        ("\\boxed{\\(B\\)}", "B"),
        ("\\boxed{В}", None),
        ("\\boxed{" * 50_000 + "B", None),
        ("\\boxed{" + "\\text{" * 3000 + "B" + "}" * 3001, None),
    ],
)
def test_a_strict_box_must_have_one_letter_of_an_option_and_nothing_contradicting(answer, letter):
    with cpu_seconds_below(5):
        assert chosen(answer, COLOURS, "boxed") == letter


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("\\boxed{blue}", "B"),
        ("\\boxed{\\text{LIGHT  blue.}}", "C"),
        ("\\boxed{E. coli}", "D"),
        ("\\boxed{B}", "B"),
        ("\\boxed{not blue}", None),
        ("\\boxed{red or blue}", None),
        ("\\boxed{red blue Light Blue}", None),
        ("blue", None),
    ],
)
def test_a_lenient_box_may_hold_the_text_of_one_option(answer, letter):
    assert chosen(answer, COLOURS, "lenient") == letter


def test_a_text_that_two_options_share_names_neither_and_letter_case_decides_where_only_it_differs():
    assert chosen("\\boxed{7}", {"A": "7", "B": "7 "}, "lenient") == "A"
    assert chosen("\\boxed{7.}", {"A": "7", "B": "7 "}, "lenient") is None
    assert chosen("\\boxed{A red}", {"A": "red", "B": "A red"}, "lenient") == "B"
    alleles = {"A": "BB Bb", "B": "Bb bb"}
    assert chosen("\\boxed{Bb bb}", alleles, "lenient") == "B"
    assert chosen("\\boxed{A: Bb bb}", alleles, "boxed") is None


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("Answer: B", "B"),
        ("Answer: A\nso\n**Final answer:** (b)", "B"),
        ("Answer: $\\boxed{B}$", "B"),
        ("Answer: light blue", "C"),
        ("The answer is: B", "B"),
        ("So, the **correct answer is**: B", "B"),
        ("Answer:\n\nB", "B"),
        ("Answer: B because the sky is", "B"),
        ("Answer: A or B", None),
        ("Answer: A as well as B", None),
        ("Answer: A as much as B", None),
        ("Answer: A-C", None),
        ("Answer: (A) \u2013 (C)", None),
        ("Answer: A - C", None),
        ("Answer: A as in the text", "A"),
        ("Answer: \\(B\\)", "B"),
        ("Answer: \\(A\\) or \\(B\\)", None),
        ("Answer\uff1a B", "B"),
        ("Answer: B blue", "B"),
        ("Answer: B light blue", None),
        ("Answer: A because B", "A"),
        ("Answer: A because B is wrong", "A"),
        ("Answer: B for short texts", "B"),
        ("Answer: B for short, C for long", None),
        ("Answer: b for short, c for long", None),
        ("Answer: B for short texts, else C", None),
        ("Answer: B because it is blue, or C because it is light", None),
        ("Answer: A/B/C/D", None),
        ("Answer: because", None),
        ("B", None),
    ],
)
def test_an_answer_line_is_read_like_a_box(answer, letter):
    assert chosen(answer, COLOURS, "line") == letter


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("Option Selected: A. No. option selected: b", "B"),
        ("Option Selected: Because", None),
        ("Option Selected: A/B/C", None),
        ("Option Selected: A or B", None),
        ("Option Selected: (A) and (C)", None),
        ("Option Selected: A and C", None),
        ("Option Selected: A B C D", None),
        ("Option Selected: a guess", None),
        ("Option Selected: A. I think so", "A"),
        ("Option Selected: A\n\nB is wrong", "A"),
        ("Option Selected: B for short, C for long", None),
        ("Option Selected: B because it is\n\nC for completeness is wrong", "B"),
        ("Option Selected: X", None),
        ("", None),
    ],
)
def test_the_last_match_of_a_pattern_counts_if_it_is_a_single_letter_of_an_option(answer, letter):
    assert chosen(answer, COLOURS, "regex", GYM_PATTERN) == letter


MMLU_PRO = r"answer is \(?([A-J])\)?"


@pytest.mark.parametrize(
    "several",
    [
        "(A) and (C)",
        "(A)(B)(C)(D)",
        "A B C D",
        "a guess",
        "A, B",
        "(A) or (B)",
        "A (or B)",
        "A and also B",
        "A as well as B",
        "A vs. B",
        "B-C",
    ],
)
def test_several_letters_are_none_after_a_pattern_that_ends_before_a_bracket(several):
    assert chosen(f"The answer is {several}", COLOURS, "regex", MMLU_PRO) is None
    assert chosen(f"The answer is {several}", COLOURS, "regex", r"answer is \(?([A-J])") is None
    assert chosen("The answer is (B).", COLOURS, "regex", MMLU_PRO) == "B"


@pytest.mark.parametrize("text", ["\n" * 20_000, "_" * 20_000, "Answer:\n" * 2500, "* " * 10_000, "answer " * 3000])
def test_repetitions_are_read_in_linear_time(text):
    with cpu_seconds_below(5):
        for mode in ("boxed", "lenient", "line"):
            chosen(text, COLOURS, mode)


def test_a_pattern_that_never_ends_on_an_answer_costs_the_answer_a_second_and_its_reward():
    taskset = MultipleChoice(mode="regex", pattern=r"((a+)+)+$", train_size=1, test_size=0)
    scores = grade(taskset, taskset.tasks("train")[0], "a" * 5000 + "b")
    assert (scores["reward"], scores["grading_timeout"]) == (0, 1)


def test_options_are_shuffled_unless_they_refer_to_each_other(tmp_path):
    rows = [{"question": f"{n}?", "options": ["w", "x", "y", "right"], "answer": 3} for n in range(200)]
    taskset = MultipleChoice(path=write(tmp_path / "rows.jsonl", *rows), test_size=0, shuffle=True)
    tasks = taskset.tasks("train")
    assert all(task.data.options[task.data.answer] == "right" for task in tasks)
    assert set(Counter(task.data.answer for task in tasks)) == set("ABCD")
    assert all(grade(taskset, task, taskset.gold(task))["reward"] == 1 for task in tasks)
    fixed = {"question": "?", "options": ["x", "y", "Both A and B", "none of these"], "answer": "C"}
    assert one_task(tmp_path, fixed, shuffle=True).data.answer == "C"


def test_rows_of_gym_keep_their_prompt_and_their_way_of_grading(tmp_path):
    row = {
        "responses_create_params": {
            "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"text": "Which?"}]}]
        },
        "options": [{"A": "x"}, {"B": "y"}, {"C": None}],
        "expected_answer": "B",
    }
    for more, mode in [
        ({"grading_mode": "lenient_boxed"}, "lenient"),
        ({"grading_mode": "lenient_answer_colon"}, "line"),
        ({"template_metadata": {"output_regex": GYM_PATTERN}}, "regex"),
        ({}, "boxed"),
    ]:
        task = one_task(tmp_path, {**row, "options": row["options"][:2], **more})
        assert [message["role"] for message in task.prompt] == ["system", "user"]
        assert text_of(task.prompt[1]["content"]) == "Which?"
        assert task.data.mode == mode
        assert task.data.answer == "B"
    with pytest.raises(DataError, match="not a regular expression"):
        one_task(tmp_path, {**row, "template_metadata": {"output_regex": "("}})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer": "E"}, "must be one of at least two options"),
        ({"answer": 4}, "must be one of at least two options"),
        ({"options": ["x"]}, "must be one of at least two options"),
        ({"options": [{"A": "x"}, {"a": "y"}]}, "must have different letters"),
        ({"question": None}, "'question' is missing"),
        ({"responses_create_params": {"input": 3}}, "'input' is a text or a list of messages"),
    ],
)
def test_a_row_that_cannot_be_graded_is_an_error_naming_its_line(tmp_path, change, says):
    row = {"question": "Which?", "options": ["x", "y"], "answer": "A", **change}
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{says}"):
        one_task(tmp_path, row)


def test_rows_with_a_missing_option_are_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    missing = '{"question": "1?", "options": [NaN, "y"], "answer": "B"}'
    path.write_text(f'{missing}\n{{"question": "2?", "options": ["x", "y"], "answer": 1}}')
    assert [task.data.answer for task in MultipleChoice(path=str(path), test_size=0).tasks("train")] == ["B"]


def test_generated_questions_have_one_right_answer_and_no_letter_is_favoured():
    taskset = MultipleChoice()
    tasks = taskset.tasks("train")
    assert len(tasks) == 2000
    assert not {taskset.key(task) for task in tasks} & {taskset.key(task) for task in taskset.tasks("test")}
    assert tasks[:50] == MultipleChoice().tasks("train")[:50] != MultipleChoice(seed=1).tasks("train")[:50]
    for letter, count in Counter(task.data.answer for task in tasks).items():
        assert letter in "ABCD"
        assert 400 < count < 600
    assert all(grade(taskset, task, taskset.gold(task))["reward"] == 1 for task in tasks[:50])
    assert all(grade(taskset, task, "\\boxed{A, B, C, D}")["reward"] == 0 for task in tasks[:50])
