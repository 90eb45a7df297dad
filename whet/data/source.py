"""The interface of a source of groups, and data sets as sources: training on rows instead of rollouts.

Rows are converted to groups when they are drawn.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, Self, TypeVar

from whet.base.errors import ConfigError, DataError
from whet.base.strict_json import JsonObject
from whet.core.types import Group
from whet.data.order import RowOrder
from whet.metrics import Metrics
from whet.metrics.clock import Timing

T = TypeVar("T")


class Source(Protocol):
    """The source of the loop's groups. Open as a context; one step is ``next_groups``, then ``published``."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def next_groups(self) -> list[Group]:
        """Return the groups of one step."""
        ...

    async def published(self, version: int) -> None:
        """Note that the groups of the last step were trained on; the weights are version ``version``."""
        ...

    def tally(self) -> tuple[Metrics, Timing]:
        """Return the metrics and timing since the last call."""
        ...

    def state(self) -> dict[str, object]:
        """Return all that a resumed run needs, as JSON values for a checkpoint."""
        ...

    def load_state(self, state: dict[str, object], version: int) -> None:
        """Continue from ``state``, after step ``version``."""
        ...


class MappedRows(Sequence[Group | str], Generic[T]):
    """Rows that are converted to groups on access. ``to_group`` returns a group, or the reason to drop the row."""

    def __init__(self, rows: Sequence[T], to_group: Callable[[T], Group | str]):
        self.rows, self.to_group = rows, to_group

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Group | str:  # type: ignore[override]
        return self.to_group(self.rows[index])


class DatasetSource:
    """``batch_size`` groups per step, epoch after epoch, in an ``order``."""

    def __init__(self, groups: Sequence[Group] | MappedRows[object], batch_size: int, order: RowOrder) -> None:
        """Raise ``ConfigError`` if there are fewer groups than a batch has."""
        if not 1 <= batch_size <= len(groups):
            raise ConfigError(
                f"a batch of {batch_size} groups can't be drawn from {len(groups)} rows; "
                f"set data.batch_size to at most {len(groups)}"
            )
        self.groups: Sequence[Group | str] = groups
        self.batch_size = batch_size
        self.order = order
        self.dropped: Counter[str] = Counter()  # reason -> rows dropped so far
        self._trained = self.order.state()
        self._metrics = Metrics()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: there are no resources."""

    async def next_groups(self) -> list[Group]:
        """Return the next batch. The uid of a group includes the epoch in which it was drawn. Raises ``DataError`` if
        all rows together don't fill a batch."""
        batch: list[Group] = []
        usable, left_out = set[int](), dict[int, str]()  # indices of rows, which may be from two epochs
        while len(usable) + len(left_out) < len(self.groups) or len(usable) >= self.batch_size:
            index = self.order.next()
            group = self.groups[index]
            if isinstance(group, str):
                left_out[index] = group
                self.dropped[group] += 1
                self._metrics.sum("data/dropped", 1)
                self.order.dropped()
                continue
            usable.add(index)
            batch.append(replace(group, uid=f"{group.uid}@{self.order.epoch}"))
            if len(batch) == self.batch_size:
                for name, passes in self.order.passes().items():
                    self._metrics.max(name, passes)
                return batch
        raise DataError(
            f"only {len(usable)} of {len(self.groups)} rows can be used, fewer than a batch of "
            f"{self.batch_size}; left out: {dict(Counter(left_out.values()))}"
        )

    async def published(self, version: int) -> None:
        """Note that all drawn groups were trained on: the state continues after them."""
        self._trained = self.order.state()

    def tally(self) -> tuple[Metrics, Timing]:
        """Return the metrics since the last call, and an empty timing."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics, Timing()

    def state(self) -> JsonObject:
        """Return the position after the last trained batch, as JSON values for a checkpoint."""
        return {"order": self._trained}

    def load_state(self, state: JsonObject, version: int = 0) -> None:
        """Continue from a state. Raises ``ConfigError`` if it is not of rows, or of other ones."""
        if "order" not in state or "next_ticket" in state:
            raise ConfigError(
                "the checkpoint is of a run that sampled answers, so it has no position in the rows; resume with the "
                "same data, or start a new run"
            )
        self.order.load_state(state["order"])
        self._trained = self.order.state()
