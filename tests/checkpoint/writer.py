"""A program that saves checkpoints and can be killed. Arguments: a folder, the saves and a ``CheckpointConfig``, the
last two in JSON."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.store import Checkpoint, CheckpointStore

Save = tuple[int, float | None, int]  # step, metric, seed of the contents


def contents(seed: int) -> dict[str, bytes]:
    """Return the files of a checkpoint, by path."""
    return {"policy/model.safetensors": bytes([seed % 256]) * 5000, "policy/learner.json": b'{"seed": %d}' % seed}


def write_contents(folder: Path, seed: int) -> None:
    for name, data in contents(seed).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


async def save_all(folder: Path, saves: Sequence[Save], config: CheckpointConfig | None = None) -> None:
    store = CheckpointStore(folder, config)
    store.clean()
    for step, metric, seed in saves:
        await store.save(step, lambda staging, seed=seed: write_contents(staging, seed), {"seed": seed}, metric)


def assert_intact(checkpoint: Checkpoint) -> None:
    """Assert that the files on disk are the ones saved with this state."""
    for name, data in contents(checkpoint.state["seed"]).items():
        assert (checkpoint.folder / name).read_bytes() == data


def main() -> None:
    settings = CheckpointConfig.model_validate(json.loads(sys.argv[3]))
    asyncio.run(save_all(Path(sys.argv[1]), [tuple(save) for save in json.loads(sys.argv[2])], settings))
