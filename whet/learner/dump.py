"""The micro-batches of a step that was skipped, on disk, to find out why: a folder of safetensors and JSON. What loads
can't run code. Knows batches and files, no model."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.batch import Batch
from whet.errors import WhetError
from whet.metrics.atomic import sync_folder, write_atomically
from whet.packing import MicroBatch
from whet.types import Distribution

_FACTS = "dump.json"


def write_dump(folder: Path, micro_batches: Sequence[MicroBatch], facts: dict[str, Any]) -> Path:
    """Write all of it beside ``folder``, then rename; an older dump there is replaced. ``facts`` are JSON values."""
    from safetensors.torch import save

    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    rest = []
    for index, micro in enumerate(micro_batches):
        tensors, other = _to_plain(micro.batch)
        write_atomically(staging / _file(index), save({**tensors, "whole_batch_tokens": micro.tokens.cpu()}))
        rest.append(other)
    write_atomically(staging / _FACTS, json.dumps({**facts, "micro_batches": rest}, indent=1).encode())
    staging.chmod(0o755)
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)
    sync_folder(folder.parent)
    return folder


def read_dump(folder: Path) -> tuple[list[MicroBatch], dict[str, Any]]:
    """The micro-batches and the facts. Raises ``WhetError`` where ``folder`` holds no dump."""
    from safetensors.torch import load_file

    try:
        facts = json.loads((folder / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise WhetError(f"{folder} holds no dump of a skipped step: {error}") from error
    micro_batches = []
    for index, other in enumerate(facts.pop("micro_batches")):
        tensors = load_file(folder / _file(index))
        whole = tensors.pop("whole_batch_tokens")
        micro_batches.append(MicroBatch(_from_plain(tensors, other), whole))
    return micro_batches, facts


def _file(index: int) -> str:
    return f"micro-batch-{index:05d}.safetensors"


def _to_plain(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"scores/{name}": value.cpu().contiguous() for name, value in batch.scores.items()}
    for column in fields(batch):
        if isinstance(value := getattr(batch, column.name), Tensor):
            tensors[column.name] = value.detach().cpu().contiguous().clone()
    return tensors, {"group_uids": list(batch.group_uids), "distribution": asdict(batch.distribution)}


def _from_plain(tensors: dict[str, Tensor], other: dict[str, Any]) -> Batch:
    scores = {name.removeprefix("scores/"): value for name, value in tensors.items() if name.startswith("scores/")}
    columns: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith("scores/")}
    return Batch(
        **columns,
        scores=scores,
        group_uids=tuple(other["group_uids"]),
        distribution=Distribution(**other["distribution"]),
    )
