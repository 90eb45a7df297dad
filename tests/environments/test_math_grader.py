"""Right is right in many spellings; a hostile reply costs itself its reward and nothing else."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.environments.math_grader import MathGrader, as_number, compare_numbers, last_boxed
from whet.errors import DataError
from whet.processes.pool import WorkerLimits


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(limits=WorkerLimits(workers=1, cpu_s=2, memory_gib=2.0)).open()
    yield grader
    asyncio.run(grader.close())


def grade(grader, boxed, gold):
    return asyncio.run(grader.compare(f"So it is \\boxed{{{boxed}}}.", gold))


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{5}", "5"),
        ("first \\boxed{1}, no, \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} apples", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{}", ""),
        ("\\boxed{1} and cut off \\boxed{2", None),
        ("I tried 31 and 32", None),
        ("", None),
        ("\\boxed{" * 5000, None),
        ("\\boxed{\\", None),
    ],
)
def test_the_last_closed_box_counts(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("given", "gold", "equal"),
    [
        ("72", "72", True),
        ("1,234", "1234", True),
        ("1{,}234", "1234", True),
        ("\\$18.00", "18", True),
        ("$18$", "18", True),
        ("+7", "7", True),
        ("-7", "7", False),
        ("-.50", "-1/2", True),
        ("50\\%", "50", True),
        ("\\frac{3}{4}", "0.75", True),
        ("-\\dfrac{3}{4}", "-0.75", True),
        ("\\frac12", "0.5", True),
        ("007.", "7", True),
        ("0.1", "0.10000000000000000001", False),
        ("12345678901234567890123", "12345678901234567890124", False),
        ("1 2", "12", None),
        ("- 7", "-7", True),
        ("3 / 4", "0.75", True),
        ("$ 18 $", "18", True),
        ("18 \\%", "18", True),
        ("1,2", "12", None),
        ("1/0", "1", None),
        ("9**9", "9", None),
        ("1e5", "100000", None),
        ("nan", "5", None),
        ("inf", "5", None),
        ("٤٢", "42", None),
        ("x", "5", None),
        ("9" * 101, "9" * 101, None),
        ("50%", "0.5", None),
        ("52_{82}", "52_8", False),
        ("52_9", "52_8", False),
        ("$(052)_{8}$", "52_8", True),
        ("-52_8", "52_8", False),
        ("2a_{16}", "2A_{16}", True),
        ("2B_{16}", "2A_{16}", False),
        ("101_2", "5", None),
        ("a_1", "a_2", None),
    ],
)
def test_plain_numbers_are_compared_exactly_and_nothing_else_is_a_number(given, gold, equal):
    assert compare_numbers(given, gold) is equal


@given(st.integers(), st.sampled_from(["{}", "{:,}", "${}$", " {} ", "{}.0", "{}.", "{}/1", "\\frac{{{}}}{{1}}"]))
def test_every_spelling_of_an_integer_is_that_integer(number, spelling):
    if "frac" in spelling:
        number = abs(number)
    assert as_number(spelling.format(number)) == number


@given(st.text(max_size=200))
def test_no_text_breaks_the_fast_path(text):
    as_number(text)
    MathGrader().extract(text)


def test_a_reply_without_a_box_is_wrong_unless_the_box_is_optional():
    reply = "I tried 31 and 32"
    assert asyncio.run(MathGrader().open().compare(reply, "32")) == {"reward": 0, "correct": 0, "format": 0}
    lenient = MathGrader(require_box=False).open()
    assert asyncio.run(lenient.compare(reply, "32")) == {"reward": 1, "correct": 1, "format": 1}
    assert asyncio.run(lenient.compare("no number", "32"))["format"] == 0


def test_the_usual_case_starts_no_worker_and_takes_microseconds():
    grader = MathGrader().open()

    async def many():
        for number in range(1000):
            assert (await grader.compare(f"\\boxed{{{number}}}", str(number)))["reward"] == 1

    started = time.perf_counter()
    asyncio.run(many())
    assert time.perf_counter() - started < 1
    assert not grader.pool.children


@pytest.mark.parametrize(
    ("given", "gold", "correct"),
    [
        ("\\frac{\\sqrt{8}}{2}", "\\sqrt{2}", 1),
        ("(x+1)^2", "x^2+2x+1", 1),
        ("(1, 2)", "(1,2)", 1),
        ("[0, 1)", "[0, 1]", 0),
        ("\\text{(B)}", "B", 1),
        ("x = 5", "5", 1),
        ("\\frac{1}{3}", "0.25", 0),
        ("12,5", "125", 0),
    ],
)
def test_mathematics_is_compared_by_meaning(grader, given, gold, correct):
    scores = grade(grader, given, gold)
    assert scores == {"reward": correct, "correct": correct, "format": 1}


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9**9",
        "__import__('os').system('touch pwned')",
        "\\text{__import__('os').system('touch pwned')}",
        "eval(open('/etc/passwd').read())",
        "{" * 400 + "1" + "}" * 400,
        "\\infty",
        "nan",
        "\\mathrm{NaN}",
        "٤٢",
        "\x00\ud7ff\\\\",
        "\\frac{1}{0}",
        "%",
        "\\",
        "1" * 999,
    ],
)
def test_hostile_answers_are_just_wrong(grader, hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores = grade(grader, hostile, "42")
    assert scores["reward"] == scores["correct"] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("endless", ["9^{9^{9^{9}}}", "10^{10^{10}}"])
def test_an_answer_that_hangs_sympy_is_killed_and_the_next_one_is_graded(grader, endless):
    before = grader.pool.restarts
    scores = grade(grader, endless, "\\sqrt{2}")
    assert scores["reward"] == 0
    assert scores.get("grading_timeout", 0) + scores.get("grading_crash", 0) == 1
    assert grader.pool.restarts > before
    assert grade(grader, "2^{1/2}", "\\sqrt{2}")["correct"] == 1


def test_overlong_and_empty_answers_are_no_answers():
    for boxed in ("1" * 2000, "", "   "):
        assert grade(MathGrader().open(), boxed, "42") == {"reward": 0, "correct": 0, "format": 0}


def test_a_known_answer_that_means_nothing_is_a_data_error(grader):
    with pytest.raises(DataError, match="known answer"):
        grade(grader, "\\sqrt{2}", " ")
