"""Finds tensors that a user's loss or estimator changes in place: others read the same tensors after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from whet.base.errors import DataError
from whet.base.lazy import Tensor
from whet.core.batch import Batch


@contextmanager
def unchanged(batch: Batch, where: str, outputs: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Raise ``DataError`` if the block changes a tensor of the batch, or one of ``outputs``, in place. ``where`` names
    the code that runs in the block."""
    columns = {name: column.values for name, column in batch.columns.items()}
    tensors = {**batch.tensors(), **batch.scores, **columns, **(outputs or {})}
    before = {name: tensor._version for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if tensor._version != before[name]:
            raise DataError(
                f"{where} changes {name.removeprefix('token_')!r} in place, which is read again later: make a new "
                "tensor, as in x = x - 1 in place of x -= 1, and where(...) in place of an assignment to a part"
            )
