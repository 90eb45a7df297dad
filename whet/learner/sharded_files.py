"""A learner's tensors in a folder of safetensors files, whole or in pieces. With several ranks each writes its pieces
into a separate file (``shard-...``) with their positions in the tensors, and reads the pieces it needs. This is torch's
distributed checkpoint format in safetensors."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from whet.base.errors import WhetError
from whet.base.strict_json import JsonObject
from whet.parallel.mesh import Ranks


def write_pieces(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write this rank's pieces of the tensors; all ranks of the group call it together."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _first_failure():
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def described(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the folder's files by name, on ``meta``. Raises ``WhetError`` if the files are
    incomplete."""
    from safetensors import SafetensorError

    try:
        if not any(folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{folder} has no *.safetensors file")
        metadata: JsonObject = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WhetError(f"no learner can be loaded from {folder}: {error}") from error
    for name, tensor in metadata.items():
        present = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if present != tensor.size.numel():  # torch would silently leave the rest unchanged
            raise WhetError(f"{folder} is incomplete: it has {present} of the {tensor.size.numel()} numbers of {name}")
    return {name: torch.empty(t.size, dtype=t.properties.dtype, device="meta") for name, t in metadata.items()}


def fill(tensors: dict[str, Tensor], folder: Path, ranks: Ranks | None = None) -> None:
    """Fill the tensors from the folder's files; each rank reads its own pieces."""
    reader, group = HuggingFaceStorageReader(str(folder)), None if ranks is None else ranks.messages
    with _first_failure(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=ranks is None)


@contextmanager
def _first_failure() -> Iterator[None]:
    """Raise the first failure of torch's distributed checkpoint, which fails on all ranks together."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise WhetError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause
