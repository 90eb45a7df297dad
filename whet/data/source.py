"""The interface of a source of groups, and a data set as one: the counterpart of sampling for training on given text.

Rows become groups when they are drawn. Knows no tokenizer; what maps a row to a group does.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar

from whet.base.errors import ConfigError, DataError
from whet.core.types import Group
from whet.data.order import TaskOrder
from whet.metrics import Metrics
from whet.metrics.clock import Timing

T = TypeVar("T")


class Source(Protocol):
    """The source of the loop's groups. Open as a context; one step is ``next_groups``, then ``published``."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def next_groups(self) -> list[Group]:
        """One step's groups."""
        ...

    async def published(self, version: int) -> None:
        """The groups last handed over have been learned from; the result is version ``version``."""
        ...

    def tally(self) -> tuple[Metrics, Timing]:
        """Metrics and timing since the last call."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint: all that a resumed run needs."""
        ...

    def load_state(self, state: dict[str, Any], version: int) -> None:
        """Go on from ``state``, after step ``version``."""
        ...


class MappedRows(Sequence[Group | str], Generic[T]):
    """Rows turned into groups when asked for. ``to_group`` gives a group, or the reason for leaving the row out."""

    def __init__(self, rows: Sequence[T], to_group: Callable[[T], Group | str]):
        self.rows, self.to_group = rows, to_group

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Group | str:  # type: ignore[override]
        return self.to_group(self.rows[index])


class DatasetSource:
    """``batch_size`` groups per step, epoch after epoch, in an order derived from the seed."""

    def __init__(
        self, groups: Sequence[Group] | MappedRows[Any], batch_size: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        """Raises ``ConfigError`` when there are fewer groups than a batch holds."""
        if not 1 <= batch_size <= len(groups):
            raise ConfigError(f"a batch of {batch_size} groups can't be drawn from {len(groups)} rows")
        self.groups: Sequence[Group | str] = groups
        self.batch_size = batch_size
        self.order = TaskOrder(len(groups), seed, shuffle)
        self.dropped: Counter[str] = Counter()  # reason -> rows left out so far
        self._trained = self.order.state()
        self._metrics = Metrics()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held."""

    async def next_groups(self) -> list[Group]:
        """Return the next batch; a group's uid says in which epoch it was drawn. Raises ``DataError`` when all
        rows together don't fill a batch."""
        batch: list[Group] = []
        usable, left_out = set[int](), dict[int, str]()  # rows, over the end of an epoch, too
        while len(usable) + len(left_out) < len(self.groups) or len(usable) >= self.batch_size:
            index = self.order.next()
            group = self.groups[index]
            if isinstance(group, str):
                left_out[index] = group
                self.dropped[group] += 1
                self._metrics.sum("data/dropped", 1)
                continue
            usable.add(index)
            batch.append(replace(group, uid=f"{group.uid}@{self.order.epoch}"))
            if len(batch) == self.batch_size:
                self._metrics.max("data/epoch", self.order.epoch + self.order.cursor / self.order.count)
                return batch
        raise DataError(
            f"only {len(usable)} of {len(self.groups)} rows can be used, fewer than a batch of "
            f"{self.batch_size}; left out: {dict(Counter(left_out.values()))}"
        )

    async def published(self, version: int) -> None:
        """Count what was drawn as trained on: from now on it is part of the state."""
        self._trained = self.order.state()

    def tally(self) -> tuple[Metrics, Timing]:
        """Metrics since the last call; nothing was waited for."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics, Timing()

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint: the position after the last batch that was trained on."""
        return {"order": self._trained}

    def load_state(self, state: dict[str, Any], version: int = 0) -> None:
        """Go on from there."""
        self.order.load_state(state["order"])
        self._trained = self.order.state()
