"""The order in which tasks or rows are drawn: endless, shuffled again in each epoch, and resumable."""

import random
from typing import Any

from whet.base.errors import ConfigError
from whet.base.seeds import derive_seed


class TaskOrder:
    """An endless order of shuffled indices. The order is a function of seed and epoch alone; the state is (epoch,
    cursor).

    >>> order = TaskOrder(3, seed=0)
    >>> sorted(order.next() for _ in range(3)), order.state()
    ([0, 1, 2], {'epoch': 0, 'cursor': 3, 'count': 3})
    """

    def __init__(self, count: int, seed: int = 0, shuffle: bool = True):
        """Order ``range(count)``; without ``shuffle``, in ascending order."""
        if count < 1:
            raise ConfigError("there is nothing to draw from: the task set or data set is empty")
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self.epoch = 0  # of the last index drawn
        self.cursor = 0  # number of indices drawn in that epoch
        self._order = self._of_epoch(0)

    def next(self) -> int:
        """Return the next index, in 0 .. count - 1."""
        if self.cursor == self.count:
            self.epoch, self.cursor = self.epoch + 1, 0
            self._order = self._of_epoch(self.epoch)
        self.cursor += 1
        return self._order[self.cursor - 1]

    def state(self) -> dict[str, int]:
        """Return the position as JSON values, for a checkpoint."""
        return {"epoch": self.epoch, "cursor": self.cursor, "count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a position. Raises ``ConfigError`` if the number of tasks has changed."""
        if state["count"] != self.count:
            raise ConfigError(
                f"the checkpoint was made with {state['count']} tasks or rows, now there are {self.count}: "
                "resume with the same data, or start a new run"
            )
        if not 0 <= state["cursor"] <= self.count or state["epoch"] < 0:
            raise ConfigError(f"the checkpoint has an impossible position in the data: {state}; it is damaged")
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._order = self._of_epoch(self.epoch)

    def _of_epoch(self, epoch: int) -> list[int]:
        order = list(range(self.count))
        if self.shuffle:
            random.Random(derive_seed(self.seed, "order", epoch)).shuffle(order)
        return order
