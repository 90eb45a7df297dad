"""A hidden number, to be found with few guesses."""

import random
from typing import Any

from pydantic import Field

from whet.core.types import Task
from whet.tasks.cases import Answer
from whet.tasks.tools.base import SeededToolTasks, right_or_wrong, solution
from whet.tools.tool import ToolError


class Guessing(SeededToolTasks):
    """Each guess is answered with higher, lower or right. Solved by halving what is left."""

    highest: int = Field(default=10_000, ge=1)
    """The number is from 1 to here. Halving needs as many guesses as this has binary digits."""
    spare: int = Field(default=2, ge=0)
    """Guesses beyond those."""

    def draw(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        highest = rng.randint(max(1, self.highest // 2), self.highest)
        guesses = highest.bit_length() + self.spare
        question = f"I think of a number from 1 to {highest}. Guess it, at most {guesses} times; then say it."
        return question, {"number": rng.randint(1, highest), "highest": highest, "guesses": guesses}

    def state(self, task: Task) -> "Game":
        return Game(task.data["number"], task.data["guesses"])

    def score(self, task: Task, state: "Game", answer: str) -> dict[str, float]:
        return right_or_wrong(state._found) | {"guesses": float(state._guesses)}

    def gold(self, task: Task) -> Answer:
        low, high, number, guessed = 1, task.data["highest"], task.data["number"], list[int]()
        while number not in guessed:
            guessed.append((low + high) // 2)
            low, high = (guessed[-1] + 1, high) if guessed[-1] < number else (low, guessed[-1] - 1)
        return solution(*(("guess", {"number": one}) for one in guessed), answer=str(number))


class Game:
    """One hidden number."""

    def __init__(self, number: int, most: int) -> None:
        self._number, self._most, self._guesses, self._found = number, most, 0, False

    def guess(self, number: int) -> str:
        """Guess the number. Returns whether the hidden one is higher or lower.

        Args:
            number: The guess
        """
        if self._guesses >= self._most:
            raise ToolError("no guess is left")
        self._guesses += 1
        self._found = self._found or number == self._number
        return "right" if number == self._number else "higher" if number < self._number else "lower"
