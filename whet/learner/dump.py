"""Dumps of a skipped step's micro-batches, for debugging: a folder of safetensors and JSON files. Loading a dump runs
no code."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.base.errors import WhetError
from whet.base.files import load_tensors, replacing, save_tensors, write_atomically
from whet.core.batch import Batch
from whet.core.packing import MicroBatch
from whet.core.types import Distribution

_FACTS = "dump.json"


def write_dump(folder: Path, micro_batches: Sequence[MicroBatch], facts: dict[str, object]) -> None:
    """Write ``folder`` as a whole; an older dump in it is replaced. ``facts`` are JSON values."""
    with replacing(folder) as staging:
        for index, micro in enumerate(micro_batches):
            save_tensors(staging / _file(index), _tensors(micro.batch) | {"whole_batch_tokens": micro.tokens})
        others = [
            {
                "group_uids": micro.batch.group_uids,
                "distribution": asdict(micro.batch.distribution),
                "images": micro.batch.images,
            }
            for micro in micro_batches
        ]
        write_atomically(staging / _FACTS, json.dumps(facts | {"micro_batches": others}, indent=1))


def read_dump(folder: Path) -> tuple[list[MicroBatch], dict[str, object]]:
    """Return the micro-batches and the facts. Raises ``WhetError`` if ``folder`` has no dump."""
    try:
        facts = json.loads((folder / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise WhetError(f"{folder} has no dump of a skipped step: {error}") from error
    micro_batches = []
    for index, other in enumerate(facts.pop("micro_batches")):
        tensors = load_tensors(folder / _file(index))
        whole = tensors.pop("whole_batch_tokens")
        batch = _batch(tensors, other)
        micro_batches.append(MicroBatch(batch, whole[batch.segment_start]))
    return micro_batches, facts


def _file(index: int) -> str:
    return f"micro-batch-{index:05d}.safetensors"


def _tensors(batch: Batch) -> dict[str, Tensor]:
    tensors = batch.tensors() | {f"score/{name}": values for name, values in batch.scores.items()}
    return tensors | {f"{column.axis}/{name}": column.values for name, column in batch.columns.items()}


def _batch(tensors: dict[str, Tensor], other: dict[str, Any]) -> Batch:
    common: dict[str, Any] = {name: tensors[name] for name in tensors if "/" not in name}
    batch = Batch(
        **common,
        group_uids=tuple(other["group_uids"]),
        distribution=Distribution(**other["distribution"]),
        images=tuple(other.get("images", ())),
    )
    for key in tensors.keys() - common.keys():
        kind, _, name = key.partition("/")
        if kind == "score":
            batch.scores[name] = tensors[key]
        else:
            batch.fill(name, tensors[key], "token" if kind == "token" else "sequence")
    return batch
