"""Games that are played by tool calls: guessing a hidden number, and a sliding puzzle."""

import math
import random
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from whet.core.types import Task
from whet.tasks.cases import Answer
from whet.tasks.scores import CORRECT, NamedScore
from whet.tasks.tools.base import SeededToolTasks, right_or_wrong, solution
from whet.tools.tool import ToolError
from whet.tools.toolbox import ToolLimits

Direction = Literal["up", "down", "left", "right"]
_STEPS: dict[Direction, tuple[int, int]] = {  # direction of a tile -> rows and columns that the gap moves
    "up": (1, 0),
    "down": (-1, 0),
    "left": (0, 1),
    "right": (0, -1),
}
_BACK: dict[Direction, Direction] = {"up": "down", "down": "up", "left": "right", "right": "left"}


@dataclass(frozen=True, slots=True)
class Hidden:
    """A hidden number."""

    number: int
    highest: int  # possible number
    guesses: int  # that are allowed


class Guessing(SeededToolTasks[Hidden]):
    """Find a hidden number; each guess is answered with higher, lower or right. Solved by binary search."""

    named_scores = CORRECT | {"guesses": NamedScore(high=math.inf)}

    highest: int = Field(default=10_000, ge=1)
    """Largest possible number. Binary search needs as many guesses as it has binary digits."""
    spare: int = Field(default=2, ge=0)
    """Guesses that are allowed in addition to a binary search."""

    def draw(self, rng: random.Random) -> tuple[str, Hidden]:
        highest = rng.randint(max(1, self.highest // 2), self.highest)
        guesses = highest.bit_length() + self.spare
        question = f"I think of a number from 1 to {highest}. Guess it, at most {guesses} times; then say it."
        return question, Hidden(rng.randint(1, highest), highest, guesses)

    def state(self, task: Task[Hidden]) -> "Game":
        return Game(task.data.number, task.data.guesses)

    def score(self, task: Task[Hidden], state: "Game", answer: str) -> dict[str, float]:
        return right_or_wrong(state._solved) | {"guesses": float(state._guesses)}

    def gold(self, task: Task[Hidden]) -> Answer:
        low, high, number, guessed = 1, task.data.highest, task.data.number, list[int]()
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


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A shuffled board."""

    tiles: list[int]  # row by row; 0 is the gap
    moves: list[Direction]  # that put the tiles in order


class SlidingPuzzle(SeededToolTasks[Shuffled]):
    """Put the tiles in order. Solved by undoing the moves that shuffled the board, or by other moves."""

    named_scores = CORRECT

    size: int = Field(default=3, ge=2, le=8)
    """Tiles along each side."""
    moves: int = Field(default=20, ge=1, le=1000)
    """Number of random moves that shuffle the board."""
    limits: ToolLimits = ToolLimits(max_calls=60)

    def draw(self, rng: random.Random) -> tuple[str, Shuffled]:
        board, moves = Board([*range(1, self.size**2), 0], self.size), list[Direction]()
        while len(moves) < self.moves or board._solved:
            direction = rng.choice(list(_STEPS))
            if not (moves and direction == _BACK[moves[-1]]) and board._from(direction) is not None:
                board.move(direction)
                moves.append(direction)
        question = f"Put the tiles in order, the gap (0) last:\n{board}\nWhen it is solved, say so."
        return question, Shuffled(board._tiles, [_BACK[direction] for direction in reversed(moves)])

    def state(self, task: Task[Shuffled]) -> "Board":
        return Board(list(task.data.tiles), self.size)

    def score(self, task: Task[Shuffled], state: "Board", answer: str) -> dict[str, float]:
        return right_or_wrong(state._solved)

    def gold(self, task: Task[Shuffled]) -> Answer:
        return solution(*(("move", {"direction": direction}) for direction in task.data.moves), answer="It is solved.")


class Board:
    """Tiles row by row; 0 is the gap."""

    def __init__(self, tiles: list[int], size: int) -> None:
        self._tiles, self._size = tiles, size

    def __str__(self) -> str:
        rows = [self._tiles[start : start + self._size] for start in range(0, len(self._tiles), self._size)]
        return "\n".join(" ".join(map(str, row)) for row in rows)

    @property
    def _solved(self) -> bool:
        return self._tiles == [*range(1, len(self._tiles)), 0]

    def _from(self, direction: Direction) -> int | None:
        """Return the index of the tile that would move; None at the edge of the board."""
        down, right = _STEPS[direction]
        row, column = divmod(self._tiles.index(0), self._size)
        row, column = row + down, column + right
        return row * self._size + column if 0 <= row < self._size and 0 <= column < self._size else None

    def move(self, direction: Direction) -> str:
        """Slide a tile into the gap. Returns the board.

        Args:
            direction: Where the tile moves
        """
        if (place := self._from(direction)) is None:
            raise ToolError(f"no tile can move {direction}")
        gap = self._tiles.index(0)
        self._tiles[gap], self._tiles[place] = self._tiles[place], 0
        return f"{self}\nsolved" if self._solved else str(self)
