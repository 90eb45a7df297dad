"""Rows of several files or published sets in one run, each with a share of the batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator

from whet.base.errors import naming
from whet.chat.renderer import Renderer
from whet.config import Component, Config
from whet.core.types import Group
from whet.data.base import ROWS
from whet.data.order import MixedOrder
from whet.data.row_kinds import Example
from whet.data.rows import FileRows, Groups, Rows, check_rows, question_key
from whet.data.source import MappedRows

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
Placed = tuple[str, Example]  # the name of a part, and a row of it


class MixturePart(Config):
    """One kind of rows of a mixture."""

    rows: Annotated[FileRows, Component(ROWS)]
    """Type, path and columns, as in ``data``."""
    weight: float = Field(1.0, gt=0)
    """The share of the rows in each batch is this weight divided by the sum of all weights."""


class RowMixture(Rows):
    """Rows of several kinds, for an algorithm that takes each of them. No prompt is in both splits of any two parts."""

    of: dict[Name, MixturePart] = Field(min_length=1)
    """The parts by their names in the metrics."""

    @field_validator("of")
    @classmethod
    def _one_batch_size(cls, of: dict[str, MixturePart]) -> dict[str, MixturePart]:
        for name, part in of.items():
            if part.rows.batch_size != FileRows.model_fields["batch_size"].default:
                raise ValueError(f"{name}.rows.batch_size is not read: data.batch_size sets the rows of a step")
        return of

    @property
    def parts(self) -> Sequence[FileRows]:
        return [part.rows for part in self.of.values()]

    def groups(self, renderer: Renderer, *, judging: bool = False) -> Groups:
        to_group = {name: part.rows.bounded(renderer, judging) for name, part in self.of.items()}

        def group(placed: Placed) -> Group | str:
            name, row = placed
            made = to_group[name](row)
            return made if isinstance(made, str) else replace(made, task=replace(made.task, environment=name))

        splits = {}
        for name, part in self.of.items():
            with naming(f"the part {name}"):
                splits[name] = part.rows.split()
        test_keys = {question_key(row) for _, held_out, _ in splits.values() for row in held_out}
        train, test = list[Placed](), list[Placed]()
        for name, (rows, held_out, tally) in splits.items():
            kept = [row for row in rows if question_key(row) not in test_keys]
            tally.drop("also in the test split of another part", len(rows) - len(kept))
            tally.report(len(kept) + len(held_out))
            check_rows([*kept, *held_out], renderer)
            train += [(name, row) for row in kept]
            test += [(name, row) for row in held_out]
        test.sort(key=lambda placed: question_key(placed[1]))  # so that a few of them are of all parts
        return {"train": MappedRows(train, group), "test": MappedRows(test, group)}

    def order(self, train: MappedRows[Any], seed: int) -> MixedOrder:
        counts = dict.fromkeys(self.of, 0)
        for name, _ in train.rows:
            counts[name] += 1
        return MixedOrder(counts, {name: part.weight for name, part in self.of.items()}, seed)
