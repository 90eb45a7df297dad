"""Arithmetic problems drawn from a seed, as terms or as short stories. They need no download."""

import random
from dataclasses import replace

from pydantic import Field

from whet.tasks.math.grader import GoldAnswer
from whet.tasks.problems import BoxedProblems, Problem
from whet.tasks.splits import DrawnTasks, Split, draw_splits

NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Farah", "Goran", "Hana")
THINGS = ("apples", "marbles", "stamps", "books", "coins", "shells")
STORIES: dict[str, tuple[str, ...]] = {
    "+": ("then finds {n} more", "then buys {n} more", "then is given {n} more"),
    "-": ("then gives away {n}", "then loses {n}", "then sells {n}"),
    "*": ("then has {n} times as many", "then multiplies them by {n}"),
}


class Arithmetic(DrawnTasks[GoldAnswer], BoxedProblems):
    """What is 17 + 4 * 3? Terms follow the usual precedence; stories are read from left to right."""

    operations: str = Field(default="+-", pattern=r"^[-+*]+$")
    """The operators that occur, as in ``+-*``."""
    terms: int = Field(default=2, ge=2, le=10)
    """Numbers per problem."""
    digits: int = Field(default=2, ge=1, le=9)
    """Most digits of a number."""
    stories: float = Field(default=0.0, ge=0, le=1)
    """Share of problems that are stories."""

    def problems(self) -> dict[Split, list[Problem]]:
        """Return the problems of both splits. Raises ``ConfigError`` if the settings allow too few different ones."""
        drawn = draw_splits("arithmetic", self.seed, self.sizes, self._draw, Problem.key, "digits, terms or operations")
        return {
            split: [replace(problem, uid=f"arithmetic/{split}/{number}") for number, problem in problems]
            for split, problems in drawn.items()
        }

    def _draw(self, rng: random.Random) -> Problem:
        numbers = [rng.randint(0 if self.digits == 1 else 1, 10**self.digits - 1) for _ in range(self.terms)]
        operations = [rng.choice(self.operations) for _ in range(self.terms - 1)]
        if rng.random() >= self.stories:
            pairs = zip(operations, numbers[1:], strict=True)
            question = f"What is {numbers[0]}" + "".join(f" {operation} {number}" for operation, number in pairs) + "?"
            return Problem("", question, str(by_precedence(numbers, operations)))
        name, things = rng.choice(NAMES), rng.choice(THINGS)
        amount, story = numbers[0], f"{name} has {numbers[0]} {things}"
        for operation, number in zip(operations, numbers[1:], strict=True):
            if operation == "-" and number > amount:
                number %= amount + 1  # at most what the person has
            elif operation == "*":
                number = number % 9 + 2
            amount = apply(operation, amount, number)
            story += ", " + rng.choice(STORIES[operation]).format(n=number)
        return Problem("", f"{story}. How many {things} does {name} have in the end?", str(amount))


def apply(operation: str, left: int, right: int) -> int:
    """Return the result of one operation.

    >>> apply("-", 3, 5)
    -2
    """
    if operation == "+":
        return left + right
    return left - right if operation == "-" else left * right


def by_precedence(numbers: list[int], operations: list[str]) -> int:
    """Return the value of a chain of operations, products first.

    >>> by_precedence([2, 3, 4], ["+", "*"])
    14
    """
    summands = [numbers[0]]
    for operation, number in zip(operations, numbers[1:], strict=True):
        if operation == "*":
            summands[-1] *= number
        else:
            summands.append(number if operation == "+" else -number)
    return sum(summands)
