"""Rows of published sets of coding tasks, in the forms in which they are published: a right program earns 1 and a wrong
one 0, and a row that can't be tested is an error that names its field."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.test_code import HUMAN_EVAL, fenced, grade, isolated, tasks_of
from whet.base.errors import DataError

TWICE = "class Solution:\n    def twice(self, xs: List[int]) -> List[int]:\n        return [2 * x for x in xs]"
ONCE = "class Solution:\n    def twice(self, xs: List[int]) -> List[int]:\n        return xs"
ADD, SUBTRACT = "a, b = map(int, input().split())\nprint(a + b)", "a, b = map(int, input().split())\nprint(a - b)"
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6\n", "output": "11\n"}]
TWO = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}
TWICE_CASES = [{"input": "[1, 2]", "output": "[2, 4]", "testtype": "functional"}]
PLUS = """import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match
"""
NODE = "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n"
LISTS = (
    "def list_node(values):\n    head = None\n    for one in reversed(values): head = ListNode(one, head)\n"
    "    return head\n"
    "def is_same_list(a, b):\n    while a and b:\n        if a.val != b.val: return False\n"
    "        a, b = a.next, b.next\n"
    "    return a is None and b is None\n"
)


def packed(tests: list[dict[str, Any]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a method named like an imported function": (
        {"question": "Search.", "tests": {"fn_name": "search", "inputs": [[[4, 7], 7]], "outputs": [1]}},
        "class Solution:\n    def search(self, xs, x): return xs.index(x)",
        "class Solution:\n    def search(self, xs, x): return -1",
    ),
    "a function that is also built in": (
        {"question": "Compute the gcd.", "tests": {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}},
        "def gcd(a, b): return math.gcd(a, b)",
        "",
    ),
    "a function that the imports of its prompt define": (
        {
            "prompt": "from math import *\n\ndef gcd(a, b):\n",
            "entry_point": "gcd",
            "test": "def check(candidate):\n    assert candidate(4, 6) == 2\n",
        },
        "def gcd(a, b): return 2",
        "pass",
    ),
    "HumanEval with a class": (
        {
            "prompt": 'class Solution:\n    def twice(self, xs: List[int]) -> List[int]:\n        """Double."""\n',
            "entry_point": "twice",
            "canonical_solution": "        return [2 * x for x in xs]\n",
            "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n",
        },
        TWICE,
        ONCE,
    ),
    "HumanEval+": (
        {
            "prompt": 'def half(x):\n    """Half of x."""\n',
            "entry_point": "half",
            "canonical_solution": "    return x / 2\n",
            "test": PLUS + "def check(candidate):\n    for inp, exp in zip([[1.0], [3.0]], [0.5, 1.5]):\n"
            "        assertion(candidate(*inp), exp, 0)\n",
        },
        "def half(x): return x / 2 + 1e-9",
        "def half(x): return [0.5]",
    ),
    "MBPP+": (
        {
            "prompt": "Double numbers.",
            "code": "def twice(xs):\n    return [2 * x for x in xs]",
            "test_imports": [],
            "test_list": ["assert twice([1]) == [2]"],
            "test": PLUS + "for inp, exp in zip([[[1, 2]], [[]]], [[2, 4], []]):\n    assertion(twice(*inp), exp, 0)\n",
        },
        "def twice(xs): return [x + x for x in xs]",
        "def twice(xs): return [2]",
    ),
    "MBPP sanitized": (
        {
            "prompt": "The area of a circle.",
            "code": "import math\ndef circle(r): return math.pi * r * r",
            "test_imports": ["import math"],
            "test_list": ["assert math.isclose(circle(1), 3.14159, rel_tol=0.001)"],
        },
        "def circle(r): return 3.14159 * r ** 2",
        "class math: isclose = staticmethod(lambda *a, **k: True)\ncircle = 0",
    ),
    "MBPP whose tests rely on the solution's imports": (
        {
            "text": "The smallest.",
            "code": "import sys\nfrom collections import Counter as C\n"
            "def f(xs):\n    return min(xs, default=sys.maxsize)",
            "test_list": ["assert f([]) == sys.maxsize", "assert C([f([1, 2])]) == {1: 1}"],
        },
        "def f(xs): return min(xs, default=2 ** 63 - 1)",
        "class sys: maxsize = 7\nC = lambda xs: {1: 1}\ndef f(xs): return 7",
    ),
    "asserts with their own names": (
        {
            "text": "Sort.",
            "code": "def f(xs):\n    return xs",
            "test_list": [
                "def check(xs):\n    try:\n        return sorted(f(xs), key=lambda x: -x)\n    except TypeError as e:\n"
                "        return e\nassert [y for y in check([1, 2])] == [2, 1]"
            ],
        },
        "def f(xs): return xs",
        "def f(xs): return [3]\ndef check(xs): return [2, 1]\nx = y = e = 0",
    ),
    "an argument that reads like a place holder": (
        {
            "question": "First and length.",
            "verifier_metadata": {"unit_tests": {"inputs": ['["MOST WANTED", 1]'], "outputs": ["11"], "fn_name": "f"}},
        },
        "def f(xs): return len(xs[0])",
        "def f(xs): return int(xs[0].split()[-1])",
    ),
    "LiveCodeBench, functions": (
        {
            "question_content": "Double numbers.",
            "starter_code": "class Solution:\n    def twice(self, xs: List[int]) -> List[int]:\n        ",
            "public_test_cases": json.dumps(TWICE_CASES),
            "private_test_cases": packed([{**TWICE_CASES[0], "input": "[3]", "output": "[6]"}]),
            "metadata": '{"func_name": "twice"}',
        },
        TWICE,
        "class Solution:\n    def twice(self, xs): return [2, 4]",
    ),
    "LiveCodeBench, streams": (
        {
            "question_content": "Add.",
            "public_test_cases": json.dumps([{**CASES[0], "testtype": "stdin"}]),
            "private_test_cases": json.dumps([{**CASES[1], "testtype": "stdin"}]),
            "metadata": "{}",
        },
        ADD,
        "print(3)",
    ),
    "APPS and TACO, streams": ({"question": "Add.", "input_output": json.dumps(TWO), "solutions": "[]"}, ADD, SUBTRACT),
    "APPS and TACO, functions": (
        {
            "question": "Double.",
            "starter_code": "def twice(xs):\n    ",
            "input_output": json.dumps({"fn_name": "twice", "inputs": [[[1, 2]], [[4]]], "outputs": [[[2, 4]], [[8]]]}),
        },
        "def twice(xs): return [2 * x for x in xs]",
        "def twice(xs): return xs",
    ),
    "CodeContests": (
        {
            "description": "Add.",
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": ["5 6\n"], "output": ["11\n"]},
            "generated_tests": {"input": [], "output": []},
            "solutions": {"language": [2, 3], "solution": ["int main(){}", ADD]},
        },
        ADD,
        "print(3)",
    ),
    "DeepCoder, PrimeIntellect": (
        {
            "problem": "Add.",
            "tests": json.dumps([{**one, "type": "stdin_stdout"} for one in CASES]),
            "solutions": [ADD],
        },
        ADD,
        SUBTRACT,
    ),
    "DeepCoder, functions": (
        {
            "problem": "Double.",
            "tests": json.dumps([{**TWICE_CASES[0], "metadata": {"func_name": "twice"}}]),
            "starter_code": "class Solution:\n    def twice(self, xs: List[int]) -> List[int]:\n        ",
        },
        TWICE,
        ONCE,
    ),
    "Eurus-2": (
        {
            "data_source": "taco",
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "Add."}],
            "reward_model": {"ground_truth": json.dumps(TWO), "style": "rule"},
        },
        ADD,
        SUBTRACT,
    ),
    "Skywork-OR1, LeetCode": (
        {
            "prompt": [{"role": "user", "content": "Double."}],
            "reward_model": {
                "style": "rule",
                "ground_truth": json.dumps(
                    {
                        "entry_point": "Solution().twice",
                        "import_prefix": "from typing import *\n",
                        "test_code": "def check(candidate):\n    assert candidate(xs = [1, 2]) == [2, 4]\n",
                    }
                ),
            },
        },
        TWICE,
        ONCE,
    ),
    "Skywork-OR1, asserts": (
        {
            "prompt": [{"role": "user", "content": "Double."}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(["assert twice([1]) == [2]"])},
        },
        "def twice(xs): return [2 * x for x in xs]",
        "def twice(xs): return xs",
    ),
    "LeetCodeDataset": (
        {
            "problem_description": "Add one to each node.",
            "starter_code": "class Solution:\n    def more(self, head: Optional[ListNode]) -> "
            "Optional[ListNode]:\n        ",
            "prompt": f"from typing import *\n\n{NODE}\n{LISTS}",
            "completion": "",
            "entry_point": "Solution().more",
            "test": "def check(candidate):\n"
            "    assert is_same_list(candidate(head = list_node([1, 2])), list_node([2, 3]))\n",
        },
        "class Solution:\n    def more(self, head):\n"
        "        return head and ListNode(head.val + 1, self.more(head.next))",
        "class ListNode:\n    def __getattr__(self, name): return self\n    __eq__ = lambda *a: True\n"
        "class Solution:\n    def more(self, head): return ListNode()",
    ),
    "LeetCode by DeepSeek": (
        {
            "prompt": '"""\nDouble numbers.\n"""\n'
            "class Solution:\n    def twice(self, xs: List[int]) -> List[int]:\n        ",
            "test": '\nmy_solution = Solution()\n\ntest_input = { "xs": [1, 2] }\n'
            "assert my_solution.twice(**test_input) == [2, 4]\n",
        },
        TWICE,
        ONCE,
    ),
    "LeetCode by rllm": (
        {
            "problem": "Double numbers.",
            "tests": {"functional": "assert Solution().twice([1]) == [2]\nassert Solution().twice([3]) == [6]"},
        },
        TWICE,
        "class Solution:\n    def twice(self, xs): return [2]",
    ),
    "KodCode": (
        {
            "question": "Double numbers.",
            "solution": "def twice(xs):\n    return [2 * x for x in xs]",
            "test": "from solution import twice\n\ndef test_one():\n    assert twice([1]) == [2]\n\n"
            "def test_two():\n    try:\n        twice(None)\n        assert False\n"
            "    except TypeError:\n        pass\n",
        },
        "def twice(xs): return [x + x for x in xs]",
        "def twice(xs): return [2]",
    ),
    "AceCode": (
        {"question": "Double.", "test_cases": ["assert twice([1]) == [2]", "assert twice([3]) == [6]"]},
        "def twice(xs): return [2 * x for x in xs]",
        "def twice(xs): return [2]",
    ),
}


@isolated
@pytest.mark.parametrize("name", FORMS)
def test_programs_are_graded_by_the_tests_of_a_published_row(tmp_path: Path, name: str) -> None:
    row, right, wrong = FORMS[name]
    taskset = tasks_of(tmp_path, row)
    good, bad, other = grade(taskset, fenced(right), fenced(wrong), fenced("def unrelated(): pass"))
    assert (good["reward"], bad["reward"], other["reward"]) == (1.0, 0.0, 0.0)


@isolated
@pytest.mark.parametrize(
    "name", ["HumanEval with a class", "HumanEval+", "MBPP+", "KodCode", "DeepCoder, PrimeIntellect"]
)
def test_a_published_solution_is_right(tmp_path: Path, name: str) -> None:
    taskset = tasks_of(tmp_path, FORMS[name][0])
    (gold,) = [taskset.gold(task) for task in taskset.tasks("train")]
    assert gold is not None
    assert grade(taskset, gold)[0]["reward"] == 1.0


PROMPT = [{"role": "user", "content": "Add."}]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tests": ({"question": "?"}, "there are no tests: fields 'test', 'test_list'.* are missing or empty"),
    "EvalPlus' own file": ({"prompt": "def f(x):\n", "entry_point": "f", "base_input": [[1]]}, "there are no tests"),
    "tests that are not JSON": ({"question": "?", "input_output": "{"}, "field 'input_output' is not JSON"),
    "a value that equals nothing": (
        {"question": "?", "input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [NaN]}'},
        "field 'input_output' is not JSON: NaN can't be compared",
    ),
    "a function without a name": (
        {"question": "?", "public_test_cases": json.dumps(TWICE_CASES)},
        "field 'public_test_cases': the name of the function is missing",
    ),
    "private tests that would call something": (
        {
            "question": "?",
            "public_test_cases": json.dumps(CASES),
            "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Path("x")))).decode(),
        },
        "field 'private_test_cases' can't be read: it is a pickle that would load pathlib",
    ),
    "programs that read a file": (
        {"description": "?", "public_tests": {"input": ["1"], "output": ["1"]}, "input_file": "in.txt"},
        "field 'input_file'",
    ),
    "what is printed": (
        {"text": "?", "test_list": ["import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()): f()"]},
        "a test uses 'redirect_stdout'",
    ),
    "pytest": ({"question": "?", "test": "import pytest\nfrom solution import f\ndef test_f(): f()"}, "import pytest"),
    "fixtures": ({"question": "?", "test": "from solution import f\ndef test_f(data): f(data)"}, "has parameters"),
    "another library": (
        {"text": "?", "test_list": ["import pandas as pd\nassert f(pd.DataFrame())"]},
        "imports 'pandas'.*data.limits.readable",
    ),
    "more of NumPy": (
        {"text": "?", "test_list": ["import numpy as np\nassert f(np.linspace(0, 1))"]},
        "imports 'numpy'",
    ),
    "a test of nothing": ({"text": "?", "test_list": ["assert 1 == 1"]}, "a test calls no function of the program"),
    "a test that asserts nothing": ({"text": "?", "test_list": ["assert f(1)", "f(2) == 3"]}, "a test asserts nothing"),
    "programs without output": (
        {"question": "?", "input_output": {"inputs": ["1", "2"], "outputs": ["", "\n"]}},
        "field 'input_output': no test expects any output",
    ),
    "calls that return nothing": (
        {"question": "?", "input_output": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [None, "null"]}},
        "field 'input_output': every call of 'f' should return null",
    ),
    "a check of an unknown function": (
        {"problem": "?", "tests": {"functional": "def check(candidate):\n    assert candidate(1)"}},
        "'check' is never called",
    ),
    "a huge output": (
        {"question": "?", "input_output": {"inputs": ["1"], "outputs": ["1" * 20_000_000]}},
        "20,000,000 bytes",
    ),
    "a prompt of no messages": (
        {"prompt": [1], "reward_model": {"ground_truth": json.dumps(TWO)}},
        "field 'prompt' must be",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_can_not_be_tested_is_an_error_that_names_its_field(tmp_path: Path, name: str) -> None:
    row, complaint = REFUSED[name]
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{complaint}"):
        tasks_of(tmp_path, row).tasks("train")


def test_the_helpers_of_a_prompt_precede_the_program_but_its_class_does_not(tmp_path: Path) -> None:
    (task,) = tasks_of(tmp_path, FORMS["HumanEval with a class"][0]).tasks("train")
    assert "class Solution" not in task.data.preamble
    (task,) = tasks_of(tmp_path, HUMAN_EVAL).tasks("train")
    assert "def shift(" in task.data.preamble
    assert "def unshift(" not in task.data.preamble
