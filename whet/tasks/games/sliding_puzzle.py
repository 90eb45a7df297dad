"""A game: put numbered tiles in order by sliding them into the gap."""

import random
from typing import Any, Literal

from pydantic import Field

from whet.core.types import Task
from whet.tasks.cases import Answer
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


class SlidingPuzzle(SeededToolTasks):
    """Put the tiles in order. Solved by undoing the moves that shuffled the board, or by other moves."""

    size: int = Field(default=3, ge=2, le=8)
    """Tiles along each side."""
    moves: int = Field(default=20, ge=1, le=1000)
    """Number of random moves that shuffle the board."""
    limits: ToolLimits = ToolLimits(max_calls=60)

    def draw(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        board, moves = Board([*range(1, self.size**2), 0], self.size), list[Direction]()
        while len(moves) < self.moves:
            direction = rng.choice(list(_STEPS))
            if not (moves and direction == _BACK[moves[-1]]) and board._from(direction) is not None:
                board.move(direction)
                moves.append(direction)
        question = f"Put the tiles in order, the gap (0) last:\n{board}\nWhen it is solved, say so."
        return question, {"tiles": board._tiles, "moves": [_BACK[direction] for direction in reversed(moves)]}

    def state(self, task: Task) -> "Board":
        return Board(list(task.data["tiles"]), self.size)

    def score(self, task: Task, state: "Board", answer: str) -> dict[str, float]:
        return right_or_wrong(state._solved)

    def gold(self, task: Task) -> Answer:
        return solution(
            *(("move", {"direction": direction}) for direction in task.data["moves"]), answer="It is solved."
        )


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
