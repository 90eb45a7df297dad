"""A batch and a model's output as Python lists: what the slow oracles loop over. Reads columns, calls no method."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whet.core.batch import Batch, ModelOutput


@dataclass
class Row:
    group: int
    reward: float
    truncated: bool
    tokens: list[int]  # indices of its trained tokens, in order


@dataclass
class Plain:
    rows: list[Row]
    length: int
    columns: dict[str, Any]  # the filled columns, as lists
    scores: dict[str, list[float]]

    def __getattr__(self, name: str) -> Any:
        return self.columns.get(name)

    @property
    def trained(self) -> list[int]:
        return [t for row in self.rows for t in row.tokens]

    def groups(self) -> list[list[Row]]:
        groups: dict[int, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        return list(groups.values())


def plain(batch: Batch) -> Plain:
    owner, trained = batch.sequence.tolist(), batch.trained.tolist()
    rows = []
    facts = zip(batch.group.tolist(), batch.reward.tolist(), batch.truncated.tolist(), strict=True)
    for s, (group, reward, truncated) in enumerate(facts):
        tokens = [t for t in range(len(owner)) if trained[t] and owner[t] == s]
        rows.append(Row(group, reward, truncated, tokens))
    columns = {name: batch.column(name).tolist() for name in batch.filled}
    return Plain(rows, len(owner), columns, {name: v.tolist() for name, v in batch.scores.items()})


@dataclass
class PlainOutput:
    """A model's output as lists."""

    logprobs: list[float]
    entropy: list[float] | None
    values: list[float] | None
    topk: list[list[float]] | None


def plain_output(output: ModelOutput) -> PlainOutput:
    def as_list(column: Tensor | None) -> Any:
        return None if column is None else column.detach().tolist()

    return PlainOutput(as_list(output.logprobs), as_list(output.entropy), as_list(output.values), as_list(output.topk))
