"""Arithmetic with a calculator: terms that are too long for mental arithmetic."""

import ast
import operator
import random
from dataclasses import dataclass
from fractions import Fraction

from pydantic import Field

from whet.core.types import Task
from whet.tasks.cases import Answer
from whet.tasks.math.arithmetic import by_precedence
from whet.tasks.scores import CORRECT
from whet.tasks.tools.base import SeededToolTasks, right_or_wrong, says, solution
from whet.tools.tool import ToolError

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True, slots=True)
class Term:
    """A term and its value."""

    term: str
    answer: str


class Calculator(SeededToolTasks[Term]):
    """What is 48213 * 7391? Solved by one call."""

    named_scores = CORRECT

    system: str | None = "Use the calculator. Then answer with the number alone."
    operations: str = Field(default="+-*", pattern=r"^[-+*]+$")
    """The operators that occur."""
    terms: int = Field(default=2, ge=2, le=10)
    """Numbers per problem."""
    digits: int = Field(default=4, ge=1, le=30)
    """Most digits of a number."""

    def draw(self, rng: random.Random) -> tuple[str, Term]:
        numbers = [rng.randrange(10 ** rng.randint(1, self.digits)) for _ in range(self.terms)]
        operations = [rng.choice(self.operations) for _ in numbers[1:]]
        term = f"{numbers[0]}" + "".join(f" {o} {n}" for o, n in zip(operations, numbers[1:], strict=True))
        return f"What is {term}?", Term(term, str(by_precedence(numbers, operations)))

    def state(self, task: Task[Term]) -> object:
        return calculate

    def score(self, task: Task[Term], state: object, answer: str) -> dict[str, float]:
        return right_or_wrong(says(answer, task.data.answer))

    def gold(self, task: Task[Term]) -> Answer:
        return solution(("calculate", {"expression": task.data.term}), answer=task.data.answer)


def calculate(expression: str) -> str:
    """Work out an expression of numbers, + - * / and brackets.

    Args:
        expression: For example 12 * (3 + 4)
    """
    if len(expression) > 200:
        raise ToolError("the expression is longer than 200 characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else str(float(value))
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        raise ToolError("not an expression of numbers, + - * / and brackets") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and (operation := _OPERATIONS.get(type(node.op))):
        result: Fraction = operation(_value(node.left), _value(node.right))
        return result
    raise ValueError("neither a number nor an operation")
