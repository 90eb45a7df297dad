"""A game: find a hidden number with few guesses."""

import random
from typing import Any

from pydantic import Field

from whet.core.types import Task
from whet.tasks.cases import Answer
from whet.tasks.tools.base import SeededToolTasks, right_or_wrong, solution
from whet.tools.tool import ToolError


class Guessing(SeededToolTasks):
    """Find a hidden number; each guess is answered with higher, lower or right. Solved by binary search."""

    highest: int = Field(default=10_000, ge=1)
    """Largest possible number. Binary search needs as many guesses as it has binary digits."""
    spare: int = Field(default=2, ge=0)
    """Guesses that are allowed in addition to a binary search."""

    def draw(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        highest = rng.randint(max(1, self.highest // 2), self.highest)
        guesses = highest.bit_length() + self.spare
        question = f"I think of a number from 1 to {highest}. Guess it, at most {guesses} times; then say it."
        return question, {"number": rng.randint(1, highest), "highest": highest, "guesses": guesses}

    def state(self, task: Task) -> "Game":
        return Game(task.data["number"], task.data["guesses"])

    def score(self, task: Task, state: "Game", answer: str) -> dict[str, float]:
        return right_or_wrong(state._solved) | {"guesses": float(state._guesses)}

    def gold(self, task: Task) -> Answer:
        low, high, number, guessed = 1, task.data["highest"], task.data["number"], list[int]()
        while number not in guessed:
            guessed.append((low + high) // 2)
            low, high = (guessed[-1] + 1, high) if guessed[-1] < number else (low, guessed[-1] - 1)
        return solution(*(("guess", {"number": guess}) for guess in guessed), answer=str(number))


class Game:
    """A hidden number, and the guesses so far."""

    def __init__(self, number: int, max_guesses: int) -> None:
        self._number, self._max_guesses, self._guesses, self._solved = number, max_guesses, 0, False

    def guess(self, number: int) -> str:
        """Guess the number. Returns whether the hidden one is higher or lower.

        Args:
            number: The guess
        """
        if self._guesses >= self._max_guesses:
            raise ToolError("no guess is left")
        self._guesses += 1
        self._solved = self._solved or number == self._number
        return "right" if number == self._number else "higher" if number < self._number else "lower"
