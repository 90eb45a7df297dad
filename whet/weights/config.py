"""How new weights reach the generator and how their arrival is proven."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from whet.config import Config

TransportName = Literal["shared_memory", "disk", "collective", "cuda_ipc"]


class WeightSyncConfig(Config):
    """The proofs run after every publication; a mismatch stops the run and names the tensors."""

    transport: TransportName = "shared_memory"
    """The way to an engine in other processes; the built-in generator needs none. ``collective``: a broadcast, by gloo
    between CPUs and by NCCL between GPUs. ``cuda_ipc``, with devices.placement=colocated: memory of the GPUs that
    learner and engine share."""
    lora: Literal["merged", "adapter"] = "merged"
    """What travels where ``model.lora`` is set. ``merged``: all weights, each time. ``adapter``, with generator=vllm:
    the frozen weights once, then LoRA's tensors alone, which the engine applies beside its matrices."""
    bucket_mb: float = Field(64, gt=0)
    """Weights are gathered and travel in buckets of this size, in MiB; a larger tensor travels alone."""
    folder: Path | None = None
    """Where ``transport=disk`` writes. The learner's first rank and the engine must both see it; None: the system's
    folder for temporary files."""
    deadline: float = Field(300.0, gt=0)
    """Seconds that learner and engines may wait for each other in a ``collective``."""
    digest: bool = True
    """Compare a digest of every tensor the generator holds with the learner's; of an engine, also read back what its
    layers compute with."""
    columns: int = Field(16, gt=0)
    """Columns of each matrix that are read back from an engine; other ones after each publication."""
    probe: bool = True
    """Compare log-probs of a few tokens, through the generator's decode path, with the learner's."""
    probe_tokens: int = Field(8, gt=0)
    """Length of the probe."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean difference of log-probs; by default 1e-3 where generator and learner compute in float32 or finer,
    0.25 where one of them computes in bfloat16."""
