"""A right answer is accepted in many spellings; a hostile reply loses its reward and breaks nothing else."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cpu_time import cpu_seconds_below
from whet.base.errors import DataError
from whet.processes.pool import WorkerLimits
from whet.tasks.math.grader import MathGrader, canonical, compare_numbers, last_boxed
from whet.tasks.math.written_numbers import as_number


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
        ("\\boxed {16}", "16"),
        ("\\boxed 16.", "16"),
        ("\\fbox{16}", "16"),
        ("\\boxed and more", None),
    ],
)
def test_the_last_closed_box_counts(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("given", "gold", "equal"),
    [
        ("72", "72", True),
        ("twelve", "12", True),
        ("\\text{Five}", "5", True),
        ("4", "\\mbox{four}", True),
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
        ("1e5", "100000", True),
        ("nan", "5", None),
        ("inf", "5", None),
        ("٤٢", "42", None),
        ("x", "5", None),
        ("9" * 401, "9" * 401, None),
        ("50%", "0.5", True),
        ("50\\text{ per cent}", "50\\%", True),
        ("50 students", "50\\%", False),
        ("0.5%", "0.5", False),
        ("52_{82}", "52_8", False),
        ("52_9", "52_8", False),
        ("$(052)_{8}$", "52_8", True),
        ("-52_8", "52_8", False),
        ("2a_{16}", "2A_{16}", True),
        ("2B_{16}", "2A_{16}", False),
        ("101_2", "5", False),
        ("7_8", "7", False),
        ("40", "40_9", True),
        ("36", "40_9", False),
        ("36_{10}", "40_9", False),
        ("4210_{\\text{five}}", "4210_5", True),
        ("101 \\text{ base } 2", "101_2", True),
        ("4.5 \\times 10^{33}", "4.5e33", True),
        ("870000000", "8.7 \\cdot 10^8", True),
        ("1.2 \\times 10^{-31}", "6.6 \\times 10^{-27}", False),
        ("10^{99999}", "5", None),
        ("1 251", "1251", True),
        ("3 1/2", "3.5", True),
        ("3\\frac12", "\\frac{7}{2}", True),
        ("0.\\overline{3}", "1/3", True),
        ("0.\\bar3", "1/3", True),
        ("0.\\overline 3", "1/3", True),
        ("0.333", "1/3", False),
        ("0.333...", "1/3", True),
        ("0.1666\\ldots", "\\frac16", True),
        ("0.333...", "0.333", False),
        ("0.33...", "1/3", False),
        ("0.3332...", "1/3", False),
        ("5 and a half", "\\frac{11}{2}", True),
        ("5\\text{ and a half}", "5.5", True),
        ("5 and a half", "5", False),
        ("five and a half", "\\frac{11}{2}", True),
        ("\\text{Five and one half}", "5.5", True),
        ("five and a half", "5", False),
        ("twenty five and a half", "5.5", None),
        ("-five and a half", "-5.5", None),
        ("five or five and a half", "5.5", None),
        ("2.5 and a half", "3", None),
        ("0.3333333", "1/3", True),
        ("145°", "145", True),
        ("145", "145^\\circ", True),
        ("5 apples", "5", True),
        ("5 \\text{ million dollars}", "\\$5,000,000", True),
        ("12 \\text{ dozen}", "12", None),
        ("10 \\text{ km}", "10 \\text{ m}", False),
        ("1000 \\text{ cm}", "10 \\text{ m}", True),
        ("840 \\text{ in}^2", "840\\text{ square inches}", True),
        ("840 \\text{ in}", "840\\text{ square inches}", False),
        ("30 \\text{ miles per hour}", "30\\text{ mph}", True),
        ("48 \\text{ m/s}", "48 \\text{ km/h}", False),
        ("550 \\text{ cents}", "\\$5.50", True),
        ("84/2", "42", False),
        ("\\frac{10}{4}", "2.5", False),
        ("\\frac{6}{8}", "\\frac34", True),
        ("40 - 86", "-46", None),
        ("2(6)", "12", None),
        ("--12", "12", None),
        ("7 \\text{ (or 8)}", "7", None),
        ("a_1", "a_2", None),
        ("**5**", "5", True),
        ("\\text{The answer is } 5", "5", True),
        ("\\textcolor{red}{5}", "5", True),
        ("= 5", "5", True),
        ("\\boldsymbol{-5}", "-5", True),
        ("{45^\\circ}", "45", True),
        ("45^{o}", "45^\\circ", True),
        ("{2 \\over 3}", "\\frac23", True),
        ("(-2)/(3)", "-\\frac23", True),
        ("0.6666666\\ldots", "\\frac23", True),
        ("USD 5", "\\$5", True),
        ("\\text{US\\$}5", "5", True),
        ("\\$-5", "-5", True),
        ("5 €", "€5", True),
        ("5 €", "\\$5", False),
        ("₹5", "5", True),
        ("22 \\text{ (base 6)}", "22_6", True),
        ("(100,101)", "100101", None),
        ("(100,101]", "100101", None),
        ("-(-5)", "5", None),
        ("5 factorial", "5", None),
        ("5 tenths", "5", None),
        ("5 \\text{ below zero}", "5", None),
        ("5 lakh", "5", None),
        ("7\\text{ a.m.}", "7\\text{ p.m.}", False),
        ("7 PM", "7\\text{ p.m.}", True),
        ("40\\%", "40^\\circ", False),
        ("½", "0.5", True),
        ("2½", "\\frac{5}{2}", True),
        ("-⅔", "-2/3", True),
        ("1⁄2", "1/2", True),
        ("3½", "1.5", False),
        ("10⁵", "100000", True),
        ("5 m²", "5\\text{ m}^2", True),
        ("5 m³", "5\\text{ m}^2", False),
    ],
)
def test_plain_numbers_are_compared_exactly_and_nothing_else_is_a_number(given, gold, equal):
    assert compare_numbers(given, gold) is equal


@given(st.integers(), st.sampled_from(["{}", "{:,}", "${}$", " {} ", "{}.0", "{}.", "{}/1", "\\frac{{{}}}{{1}}"]))
def test_every_spelling_of_an_integer_is_that_integer(number, spelling):
    if "frac" in spelling:
        number = abs(number)
    assert as_number(spelling.format(number)) == number


def test_votes_for_different_numbers_of_a_base_are_different():
    written = ["1A_{16}", "2B_{16}", "-2B_{16}", "101_2", "101", "10"]
    assert len(set(map(canonical, written))) == len(written)
    assert canonical("1A_{16}") == canonical("1a_{\\text{sixteen}}") == canonical("01A_{16}")


def test_votes_are_equal_where_the_grader_finds_the_answers_equal():
    assert canonical("10 m", "10 km") == canonical("0.01", "10 km") != canonical("10 km", "10 km")
    assert canonical("10000 m", "10 km") == canonical("10", "10 km") == canonical("10 km", "10 km")
    assert len({canonical(given, "10 km") for given in ("10", "10 kg", "10 s")}) == 3
    assert canonical("10 apples", "10") == canonical("10", "10")
    assert canonical("84/2", "42") != canonical("42", "42")
    assert canonical("\\ln(2)") == canonical("\\ln 2") == canonical("ln 2") != canonical("\\ln(2x)")
    assert canonical("\\ln(2)x") != canonical("\\ln 2x") == canonical("\\ln(2x)")
    assert canonical("6/8", "3/4") == canonical("3/4", "3/4")
    assert canonical("0.333...", "1/3") == canonical("1/3", "1/3")


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

    with cpu_seconds_below(2):
        asyncio.run(many())
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


@pytest.mark.parametrize(
    ("given", "gold", "correct"),
    [
        ("17 = 16", "16", 0),
        ("40 - 86", "-46", 0),
        ("40 - 86 = -46", "-46", 1),
        ("40 - 86 = 3 = -46", "-46", 0),
        ("five or six", "5", 0),
        ("\\{\\emptyset\\}", "\\emptyset", 0),
        ("\\{\\}", "\\emptyset", 1),
        ("-five", "5", 0),
        ("2", "\\text{two lines}", 0),
        ("2x = 16", "16", 0),
        ("a + b = 16", "16", 1),
        ("7 \\approx 8", "7", 0),
        ("7 \\approx 8", "8", 0),
        ("\\approx 16", "16", 1),
        ("\\frac23 \\approx 0.67", "0.67", 1),
        ("\\sqrt{2} \\approx 1.414", "\\sqrt2", 1),
        ("\\sqrt{2} \\approx 1.5", "\\sqrt2", 0),
        ("1.414", "\\sqrt2", 0),
        ("1.41421356", "\\sqrt2", 1),
        ("\\sqrt{2} \\text{ (or 3)}", "\\sqrt2", 0),
        ("\\frac{1}{2006!}", "\\frac{1}{2004!}", 0),
        ("\\frac{1}{2004!}", "\\frac{1}{2004!}", 1),
        ("\\sum_{k=1}^{100} k", "5050", 0),
        ("\\int_0^1 x\\,dx", "\\frac12", 0),
        ("\\binom{5}{2}", "10", 0),
        ("\\lfloor 7.5 \\rfloor", "7", 0),
        ("\\sqrt{144}", "12", 0),
        ("2^{10}", "1024", 0),
        ("1024", "2^{10}", 1),
        ("2^5\\pi", "32\\pi", 0),
        ("\\pi(20 + 12)", "32\\pi", 0),
        ("(2+3i)(4-i)", "11+10i", 0),
        ("10i + 11", "11+10i", 1),
        ("\\sin 60^\\circ", "\\frac{\\sqrt3}{2}", 0),
        ("x^2 + 2 - 1", "x^2+1", 0),
        ("(3-2, 2)", "(1,2)", 0),
        ("\\begin{bmatrix}1\\\\2\\end{bmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", 1),
        ("\\begin{bmatrix}3-2\\\\2\\end{bmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", 0),
        ("\\pm 2", "-2, 2", 1),
        ("\\pm 2", "2", 0),
        ("x = 1 - \\sqrt2 \\text{ or } x = 1 + \\sqrt{2}", "1 \\pm \\sqrt{2}", 1),
        ("2, 1", "\\{1, 2\\}", 1),
        ("5, 6", "5", 0),
        ("5 \\text{ or } 6", "5", 0),
        ("B, A", "\\text{A,B}", 1),
        ("A, B, C", "\\text{A,B}", 0),
        ("odd or even", "\\text{odd}", 0),
        ("Saturday", "\\text{saturday}", 1),
        ("(2,1)", "(1,2)", 0),
        ("(1,\\infty) \\cup (-\\infty,1)", "(-\\infty, 1)\\cup(1, \\infty)", 1),
        ("1 \\le x < 2", "[1,2)", 1),
        ("y = 1 - 2x", "y=-2x+1", 1),
        ("-y = 1 - 2x", "y=-2x+1", 0),
        ("2x-y+3z=-8", "2x - y + 3z + 8 = 0", 1),
        ("x=3, y=2", "x=2, y=3", 0),
        ("x=5, y=3", "(5,3)", 1),
        ("x = \\frac12 \\text{ and } y = -3", "(\\frac{1}{2},-3)", 1),
        ("a=1, b=2, c=3", "(1,2,3)", 1),
        ("x=5 \\text{ or } y=3", "(5,3)", 0),
        ("x=3, y=5", "(5,3)", 0),
        ("y=3, x=5", "(5,3)", 1),
        ("c=3, a=1, b=2", "(1,2,3)", 1),
        ("5, x=3", "(5,3)", 0),
        ("x=5, x=3", "(5,3)", 0),
        ("y=5, x=3", "(5,3)", 0),
        ("p=5, q=3", "(5,3)", 0),
        ("x=2+3, y=3", "(5,3)", 0),
        ("x=5, y=3", "[5,3]", 0),
        ("x=5, y=3, z=1", "(5,3)", 0),
        ("x²+1", "x^2+1", 1),
        ("x⁻¹", "x^{-1}", 1),
        ("July 4th", "\\text{July 4}", 1),
        ("July 4", "July 4th, 1776", 0),
        ("July 4th", "July 5", 0),
        ("4 July", "\\text{July 4}", 1),
        ("4th of July", "July 4", 1),
        ("July 4", "\\text{4 July}", 1),
        ("5 July", "July 4", 0),
        ("4 July 1776", "July 4", 0),
        ("4 July or 5 July", "July 4", 0),
        ("2 March", "2", 0),
        ("\\textbf{(A)}\\ 5", "5", 1),
        ("\\textbf{(A)}\\ 5", "\\text{(A)}", 1),
        ("\\mathbf{(A)}\\ \\frac12", "0.5", 1),
        ("\\textbf{(B)}\\ 5", "A", 0),
        ("\\textbf{(A)}\\ 6", "5", 0),
        ("\\textbf{(A)}\\ 5 \\textbf{(B)}\\ 6", "A", 0),
        ("\\textbf{(A)} \\text{ or } \\textbf{(B)}", "A", 0),
        ("\\textbf{(A)} \\textbf{(B)}\\ 5", "5", 0),
        ("\\textbf{(A)}\\ 5", "5A", 0),
        ("(A)\\ 5", "5", 1),
        ("(A) 5", "\\text{(A)}", 1),
        ("(A) 6", "5", 0),
        ("(B) 5", "A", 0),
        ("(A) (B)", "B", 0),
        ("\\text{(A)} (B)", "B", 0),
        ("(A) (B)", "A", 0),
        ("(A) 5 (B) 6", "5", 0),
        ("(A) 5, (B) 6", "6", 0),
        ("f(A) 5", "5", 0),
        ("12\\pi \\text{ m}^2", "12\\pi \\text{ cm}^2", 0),
        ("12π", "12\\pi \\text{ cm}^2", 1),
        ("12*pi", "12\\pi", 1),
        ("9 sqrt(2)", "9\\sqrt2", 1),
        ("√(2)", "\\sqrt2", 1),
        ("2", "2t", 0),  # no tonnes
        ("\\sin^2 t x", "\\sin^2 t", 0),
        ("-160+12x+4x^2", "4x^2 + 12x - 160", 1),  # terms that cancel
        ("-q + p", "p - q", 1),
        ("5x + 3x", "8x", 0),
        ("x^3 \\cdot x^4", "x^7", 0),
        ("\\frac{d}{dx} x^2", "2x", 0),
        ("x", "|x|", 0),
        ("\\exp(x)", "e^x", 1),
        ("\\log_e 2", "\\ln 2", 1),
        ("\\log_{\\mathrm{e}}(2)", "\\ln 2", 1),
        ("\\log_2 2", "\\ln 2", 0),
        ("\\ln(2)", "\\ln 2", 1),
        ("ln 2", "\\ln 2", 1),
        ("2 ln(2)", "2\\ln 2", 1),
        ("e^{ln 2}", "2", 0),
        ("lnx 2", "\\ln 2", 0),
        ("x + 15_7", "x + 15", 0),
        ("\\not= 192", "192", 0),
        ("x \\neq 192", "192", 0),
        ("97 \\to y = 3", "y = 3", 0),
        ("2(y = 3)", "y = 3", 0),
        ("\\cancel{y = 3} 97", "y = 3", 0),
        ("3 = y", "y = 3", 1),
        ("2, 3, ...", "2, 3", 0),
        ("2^{n - 1}_7", "2^{n - 1}", 0),
        ("\\text{Not} = 5", "5", 0),
        ("\\text{Area} = 5", "5", 1),
        ("\\text{B.}", "\\text{B}", 1),
        ("1 2", "12", 0),
        ("4:17", "8:34", 0),
        ("2:4", "1:2", 1),
        ("\\{\\}", "\\varnothing", 1),
        ("x < 1 \\text{ or } x > 2", "(-\\infty, 1) \\cup (2, \\infty)", 1),
        ("x < 1 \\text{ and } x > 2", "(-\\infty, 1) \\cup (2, \\infty)", 0),
        ("x^2 > 4", "(-\\infty, -2) \\cup (2, \\infty)", 0),
        ("x < (1, 2)", "(1, 2)", 0),
        ("100101", "(100,101)", 0),
        ("(100,101]", "(100,101)", 0),
        ("0.56 = 56\\% + 1", "0.56 = 56\\%", 0),
        ("56\\%", "0.56 = 56\\%", 1),
        ("\\left[\\begin{array}{c}1\\\\[4pt]2\\end{array}\\right]", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", 1),
        ("\\left(\\begin{smallmatrix}1\\\\2\\\\ \\end{smallmatrix}\\right)", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", 1),
        ("\\begin{vmatrix}1\\\\2\\end{vmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", 0),
        ("\\frac{\\sqrt3}{3}", "\\frac{1}{\\sqrt3}", 1),
        ("\\sqrt3 \\cdot \\sqrt3", "3", 0),
        ("（-∞，2）", "(-\\infty,2)", 1),
        ("1、−２％", "1, -2\\%", 1),
        ("‑5", "-5", 1),
        ("\\lvert x \\rvert", "|x|", 1),
        ("\\langle 1, 2 \\rangle", "(1,2)", 1),
        ("\\langle 2, 1 \\rangle", "(1,2)", 0),
        ("\\text{all real numbers}", "(-\\infty, \\infty)", 1),
        ("x \\in \\mathbb{R}", "\\text{All real numbers}", 1),
        ("\\mathbb{R}", "x = 5", 0),
        ("(-\\infty,2]\\cup[3,\\infty)", "x \\le 2 \\text{ or } x \\ge 3", 1),
        ("(-\\infty,2]\\cup[4,\\infty)", "x \\le 2 \\text{ or } x \\ge 3", 0),
        ("(-\\infty,2]\\cup[3,\\infty)", "x \\le 2 \\text{ and } x \\ge 3", 0),
        ("5 \\frac{\\text{m}}{\\text{s}^2}", "5", 1),
        ("5 \\frac{\\text{m}}{\\text{s}}", "5\\text{ km/h}", 0),
        ("5\\mathrm{~kg} \\cdot \\mathrm{m} / \\mathrm{s}^{2}", "5", 1),
        ("5\\ \\mathrm{m\\,s^{-2}}", "5\\text{ m/s}^2", 1),
        ("5\\ \\mathrm{m\\,s^{-2}}", "5\\text{ m/s}", 0),
        ("5\\text{ m}^3/\\text{s}", "5 \\text{ cubic meters per second}", 1),
        ("5\\text{ m}^3/\\text{s}", "5\\text{ m}^2/\\text{s}", 0),
        ("5\\text{ m or}^2/\\text{six}", "5", 0),
        ("x = \\frac{10}{2} = 5", "5", 1),
        ("k = 2 + 3 = 5", "k = 5", 1),
        ("k = 2 + 2 = 5", "k = 5", 0),
        ("a + b = 5", "5", 1),
        ("x_1 + x_2 = 5", "5", 1),
        ("x - 1 = 5", "5", 0),
        ("\\frac{\\theta}{2} = 5", "5", 0),
        ("x - 5 = 0", "x = 5", 0),
        ("2", "2 n - n^2", False),  # letters behind a number are not a unit
        ("2 n - n^2", "2", False),
        ("n(2 - n)", "2 n - n^{2}", True),
        ("5 a b", "5 x y", False),
        ("\\frac{1}{2}", "\\frac{1}{2} abc", False),
        ("2", "2 c^{2}", False),
        ("9", "3 + 6 m", False),
        ("m(m + 3)", "m^2 + 3 m", True),
        ("\\frac{3 + \\sqrt{5}}{2} m", "\\frac{3 + \\sqrt{5}}{2}", True),
        ("3 p.m.", "3\\text{ pm}", True),
    ],
)
def test_an_answer_counts_for_what_it_states_not_for_what_could_be_computed(grader, given, gold, correct):
    assert grade(grader, given, gold)["correct"] == correct


@pytest.mark.parametrize(
    ("question", "given", "gold", "correct"),
    [
        ("Simplify $\\sqrt{242}$.", "\\sqrt{242}", "11\\sqrt{2}", 0),
        ("What is $\\sqrt{242}$?", "\\sqrt{2 \\cdot 121}", "11\\sqrt{2}", 0),
        ("What is $\\sqrt{242}$?", "11 \\cdot \\sqrt{2}", "11\\sqrt{2}", 1),
        ("How long is the diagonal?", "\\sqrt{242}", "11\\sqrt{2}", 1),
        ("Factor $x^2-1$.", "x^2 - 1", "(x-1)(x+1)", 0),
        ("Factor $x^2-1$.", "(1+x)(-1+x)", "(x-1)(x+1)", 1),
        ("Expand $(x+1)(x+2)$.", "(x+2)(x+1)", "x^2+3x+2", 0),
        ("Expand $(x+1)(x+2)$.", "2+3x+x^2", "x^2+3x+2", 1),
        ("Which polynomial has the roots -1 and -2?", "(x+2)(x+1)", "x^2+3x+2", 1),
        ("Simplify $\\frac48$.", "4/8", "\\frac12", 0),
        ("How likely is it?", "4/8", "\\frac12", 1),
        ("Write 0.5 as a fraction.", "0.5", "\\frac12", 0),
        ("Write 1/2 as a decimal.", "1/2", "0.5", 0),
        ("What is $5 \\times 10^2$?", "5 \\times 10^2", "500", 0),
        ("There are 15 and 18.00 dollars.", "18", "18", 1),
        ("Factor $2x+4$.", "2x+4", "2(x+2)", 0),
        ("Factor $x^2-4$.", "x(x - 4/x)", "(x-2)(x+2)", 0),
        ("Factor $x^2-4$.", "(-2+x)(x+2)", "(x-2)(x+2)", 1),
        ("Expand $(x+1)^2$.", "x(x+2)+1", "x^2+2x+1", 0),
        ("How many minutes are 7 hours?", "7\\text{ hours}", "420\\text{ minutes}", 0),
        ("How many minutes are 7 hours?", "420", "420\\text{ minutes}", 1),
        ("How far is it?", "3\\text{ m}", "300\\text{ cm}", 1),
        ("Solve for y: $2x+y=3$", "y+2x=3", "y=3-2x", 0),
        ("Write $y-3=2(x-1)$ in slope-intercept form", "y-3=2(x-1)", "y=2x+1", 0),
        ("Write $y-3=2(x-1)$ in slope-intercept form", "2x+1=y", "y=2x+1", 1),
        ("The line \\(2x+y=3\\) has which equation?", "y+2x=3", "y=3-2x", 0),
        ("The line \\[2x+y=3\\] has which equation?", "y=-2x+3", "y=3-2x", 1),
        ("What is the line through both points?", "y-2x=1", "y=2x+1", 1),
        ("Give the simplest equation.", "1=x", "x=1", 1),
        ("Solve $x^2 + x = 0$ for $x > -1$.", "x^2+x=0", "0", 0),
        ("If $x+y=5$ and $x-y=5$, what is $x$?", "x + y = 5", "5", 0),
        ("If \\(x^{2}+y=5\\) and \\(y=0\\), what is \\(x^2\\)?", "x^2+y=5", "5", 0),
        ("If x + y = 5 and x - y = 5, what is x?", "x+y=5", "5", 0),
        ("If x + y = 5 and x - y = 5, what is x?", "x=5", "5", 1),
        ("If 2x + y = 5.5 and x = 0.5, what is x + y?", "x+y=5", "5", 1),
        ("Write the ratio 6:8 in simplest form.", "6:8", "3:4", 0),
        ("Write the ratio 6:8 in simplest form.", "3 : 4", "3:4", 1),
        ("Write the ratio 12:16 in simplest form.", "6:8", "3:4", 0),
        ('Enter "odd" or "even".', '"odd"', "\\text{odd}", 1),
    ],
)
def test_a_question_again_earns_nothing_where_its_form_was_the_task(grader, question, given, gold, correct):
    assert asyncio.run(grader.compare(f"\\boxed{{{given}}}", gold, question))["correct"] == correct


@pytest.mark.parametrize("gold", ["\\sqrt{2}", "x^2+1", "\\frac{\\sin x}{x}"])
def test_answers_that_nothing_bounded_can_compute_are_wrong_without_a_time_out(grader, gold):
    endless = [
        "9^{9^{9^{9}}}",
        "10^{10^{10}}",
        "x^{10^9}",
        "(10^9)!",
        "((((x+1)^{99})^{99})^{99})^{99}",
        "(a+b+c+d+e+f)^{90}",
        "\\frac{1}{" * 30 + "2" + "}" * 30,
        "\\sqrt{" * 60 + "2" + "}" * 60,
        "\\tan(x)^{90}+\\sin(x)^{90}",
        "\\frac{x^{90}-1}{x-1}",
        "2^{-99999999}",
    ]
    before = grader.pool.restarts
    for hostile in endless:
        assert grade(grader, hostile, gold) == {"reward": 0, "correct": 0, "format": 1}, hostile
    assert grader.pool.restarts == before


def test_empty_and_too_long_answers_have_no_format_score():
    for boxed in ("1" * 2000, "", "   "):
        assert grade(MathGrader().open(), boxed, "42") == {"reward": 0, "correct": 0, "format": 0}


def test_a_gold_answer_that_is_not_mathematics_is_a_data_error(grader):
    with pytest.raises(DataError, match="gold answer"):
        grade(grader, "\\sqrt{2}", " ")
