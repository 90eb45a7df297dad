"""The micro-batches of a step that was skipped, on disk, to find out why: a folder of safetensors and JSON. What loads
can't run code. Knows batches and files, no model."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.batch import Batch
from whet.errors import WhetError
from whet.files import load_tensors, replacing, save_tensors, write_atomically
from whet.packing import MicroBatch
from whet.types import Distribution

_FACTS = "dump.json"
_SCORE = "scores/"


def write_dump(folder: Path, micro_batches: Sequence[MicroBatch], facts: dict[str, Any]) -> None:
    """Write ``folder`` as a whole; an older dump there is replaced. ``facts`` are JSON values."""
    with replacing(folder) as staging:
        for index, micro in enumerate(micro_batches):
            save_tensors(staging / _file(index), _tensors(micro.batch) | {"whole_batch_tokens": micro.tokens})
        others = [
            {"group_uids": micro.batch.group_uids, "distribution": asdict(micro.batch.distribution)}
            for micro in micro_batches
        ]
        write_atomically(staging / _FACTS, json.dumps(facts | {"micro_batches": others}, indent=1))


def read_dump(folder: Path) -> tuple[list[MicroBatch], dict[str, Any]]:
    """Return the micro-batches and the facts. Raises ``WhetError`` where ``folder`` holds no dump."""
    try:
        facts = json.loads((folder / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise WhetError(f"{folder} holds no dump of a skipped step: {error}") from error
    micro_batches = []
    for index, other in enumerate(facts.pop("micro_batches")):
        columns: dict[str, Any] = load_tensors(folder / _file(index))
        whole = columns.pop("whole_batch_tokens")
        scores = {name: columns.pop(name) for name in list(columns) if name.startswith(_SCORE)}
        batch = Batch(
            **columns,
            scores={name.removeprefix(_SCORE): values for name, values in scores.items()},
            group_uids=tuple(other["group_uids"]),
            distribution=Distribution(**other["distribution"]),
        )
        micro_batches.append(MicroBatch(batch, whole))
    return micro_batches, facts


def _file(index: int) -> str:
    return f"micro-batch-{index:05d}.safetensors"


def _tensors(batch: Batch) -> dict[str, Tensor]:
    columns = {column.name: getattr(batch, column.name) for column in fields(batch)}
    return {name: value for name, value in columns.items() if isinstance(value, Tensor)} | {
        f"{_SCORE}{name}": values for name, values in batch.scores.items()
    }
