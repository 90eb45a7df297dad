"""The order in which tasks or rows are drawn: endless, shuffled again in each epoch, and resumable."""

import random
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from whet.base.errors import ConfigError, DataError
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject


class RowOrder(Protocol):
    """An endless order of row numbers."""

    @property
    def epoch(self) -> int:
        """Return the number of times that the last row had been drawn before."""
        ...

    def next(self) -> int:
        """Return the number of the next row."""
        ...

    def dropped(self) -> None:
        """Note that the last row can't be used. Raises ``DataError`` if none of its kind can."""
        ...

    def passes(self) -> dict[str, float]:
        """Return the passes over the rows so far, by the name of the metric."""
        ...

    def state(self) -> JsonObject: ...

    def load_state(self, state: dict[str, object]) -> None: ...


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
        self._order: Sequence[int] | None = None  # of that epoch, once an index is drawn

    def next(self) -> int:
        """Return the next index, in 0 .. count - 1."""
        if self.cursor == self.count:
            self.epoch, self.cursor, self._order = self.epoch + 1, 0, None
        if self._order is None:
            self._order = self._of_epoch(self.epoch)
        self.cursor += 1
        return self._order[self.cursor - 1]

    def dropped(self) -> None:
        """Do nothing: the next row takes its place."""

    def passes(self) -> dict[str, float]:
        """See ``RowOrder``."""
        return {"data/epoch": self.epoch + self.cursor / self.count}

    def state(self) -> dict[str, int]:
        """Return the position as JSON values, for a checkpoint."""
        return {"epoch": self.epoch, "cursor": self.cursor, "count": self.count}

    def load_state(self, state: JsonObject) -> None:
        """Continue from a position. Raises ``ConfigError`` if the number of tasks has changed."""
        if state.get("count") != self.count:
            raise ConfigError(
                f"the checkpoint was made with {state.get('count', 'a mixture of')} tasks or rows, now there are "
                f"{self.count}: resume with the same data, or start a new run"
            )
        if not 0 <= state["cursor"] <= self.count or state["epoch"] < 0:
            raise ConfigError(f"the checkpoint has an impossible position in the data: {state}; it is damaged")
        self.epoch, self.cursor, self._order = state["epoch"], state["cursor"], None

    def _of_epoch(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.count)
        order = array("I", range(self.count))  # 4 bytes for a row: a list of 10 million takes 360 MB
        random.Random(derive_seed(self.seed, "order", epoch)).shuffle(order)
        return order


class MixedOrder:
    """Rows of several kinds that follow each other in one list, each kind drawn in proportion to its weight, shuffled
    by itself. The next row is of the kind that is furthest behind its share, so that in any sequence of draws each has
    its share, up to one. A row that can't be used is replaced by one of its kind."""

    def __init__(self, counts: Mapping[str, int], weights: Mapping[str, float], seed: int = 0) -> None:
        """``counts``: rows of each kind, in the order of the list. Raises ``ConfigError`` for a kind without rows."""
        if empty := next((name for name, count in counts.items() if not count), None):
            raise ConfigError(f"there is nothing to draw from: {empty} has no rows to train on")
        self.weights = weights
        self.orders = {name: TaskOrder(count, derive_seed(seed, "mixture", name)) for name, count in counts.items()}
        self.drawn = dict.fromkeys(counts, 0)  # usable rows
        self._first = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        self._name = next(iter(counts))  # kind of the last row
        self._dropped = 0  # rows since the last usable one
        self._usable = True  # the last row

    @property
    def epoch(self) -> int:
        """See ``RowOrder``."""
        return self.orders[self._name].epoch

    def next(self) -> int:
        """Return the number of the next row."""
        share = (sum(self.drawn.values()) + 1) / sum(self.weights.values())
        self._name = max(self.drawn, key=lambda name: self.weights[name] * share - self.drawn[name])
        self.drawn[self._name] += 1
        self._dropped, self._usable = 0 if self._usable else self._dropped, True
        return self._first[self._name] + self.orders[self._name].next()

    def dropped(self) -> None:
        """See ``RowOrder``."""
        name, count = self._name, self.orders[self._name].count
        self.drawn[name] -= 1  # so the next row is of this kind, too
        self._dropped, self._usable = self._dropped + 1, False
        if self._dropped == 2 * count:  # one usable row may be the first of one epoch and the last of the next one
            raise DataError(f"none of the {count} rows of {name} can be used; log.txt names the reasons")

    def passes(self) -> dict[str, float]:
        """See ``RowOrder``. A pass over a mixture is as many draws as it has rows."""
        whole = sum(self.drawn.values()) / sum(order.count for order in self.orders.values())
        parts = {f"data/{name}/epoch": order.passes()["data/epoch"] for name, order in self.orders.items()}
        return {"data/epoch": whole, **parts}

    def state(self) -> JsonObject:
        """Return the position as JSON values, for a checkpoint."""
        return {"drawn": dict(self.drawn), "orders": {name: order.state() for name, order in self.orders.items()}}

    def load_state(self, state: JsonObject) -> None:
        """Continue from a position. Raises ``ConfigError`` if the kinds of rows or their numbers have changed."""
        if (saved := sorted(state.get("drawn", ()))) != sorted(self.drawn):
            raise ConfigError(
                f"the checkpoint was made with {'the kinds ' + ', '.join(saved) if saved else 'one kind'} of rows, but "
                f"the recipe has {', '.join(sorted(self.drawn))}; resume with the same data, or start a new run"
            )
        self.drawn = {name: state["drawn"][name] for name in self.drawn}
        for name, order in self.orders.items():
            order.load_state(state["orders"][name])
