"""A model as a checkpoint of Megatron Core (``torch_dist``), which its ``dist_checkpointing.load`` reads into models of
any parallelism. Written by torch's distributed checkpoint: Megatron Core is not needed."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.errors import ConfigError
from whet.fetch.megatron import FORMAT, NEWEST
from whet.fetch.megatron_layout import FAMILIES, to_megatron

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint import DefaultSavePlanner
    from transformers import PretrainedConfig

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_COMMON = {"checkpoint_version": 3.0}  # since which queries, keys and values are ordered as they are here


def check_megatron(config: "PretrainedConfig") -> None:
    """Raise ``ConfigError`` if a model with this Hugging Face config can't become a checkpoint of Megatron Core."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"checkpoints of Megatron Core are written for {', '.join(FAMILIES)}, and this model is "
            f"{config.model_type!r}; leave out --megatron"
        )


def write_megatron(tensors: "Mapping[str, Tensor]", config: "PretrainedConfig", folder: Path) -> None:
    """Write a model's Hugging Face tensors, by name, as the folder's checkpoint ``release``, without an iteration or an
    optimizer."""
    import torch
    from torch.distributed.checkpoint import FileSystemWriter, save

    inner = folder / "release"
    inner.mkdir()
    named: dict[str, object] = {}
    for key, tensor in to_megatron(tensors, config):
        named[key] = tensor.contiguous()
        named |= {name: [None] for name in _extra_states(key, tensor)}
    with warnings.catch_warnings(), _first_cause():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(named, storage_writer=FileSystemWriter(inner), planner=_planner(), no_dist=True)
        torch.save(_COMMON, inner / "common.pt")
    (inner / FORMAT).write_text(json.dumps(_FORMAT), encoding="utf-8")
    (folder / NEWEST).write_text("release", encoding="utf-8")


def _planner() -> "DefaultSavePlanner":
    """Return a planner that describes tensors as before torch 2.15, which adds their strides: older versions and
    Megatron Core 0.16 can't read these."""
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan

    class Properties(TensorProperties):
        def __reduce__(self) -> tuple[object, ...]:
            return TensorProperties, (), self.__getstate__()[:5]

    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            for stored in metadata.state_dict_metadata.values():
                if isinstance(stored, TensorStorageMetadata):
                    stored.properties.__class__ = Properties
            return plans, metadata

    return Planner(flatten_state_dict=False)


@contextmanager
def _first_cause() -> Iterator[None]:
    """Raise the error of a full disk, or an interrupt, which torch replaces by an error about the positions in its
    file."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        failed = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        causes = [cause for each in failed for cause in (each, each.__context__)]
        raise next((cause for cause in causes if isinstance(cause, OSError | KeyboardInterrupt)), error) from None


def _extra_states(key: str, tensor: "Tensor") -> list[str]:
    """Return the keys under which Megatron Core looks for the state of 8-bit layers, which is empty here."""
    layer, _, kind = key.rpartition(".")
    if not layer.startswith("decoder.layers.") or ".linear_" not in layer or kind != "weight":
        return []
    axes = tensor.shape[:-2] or (1,)
    whole = ".".join(map(str, axes))
    return [f"{layer}._extra_state/shard_{'.'.join(map(str, at))}_{whole}" for at in product(*map(range, axes))]
