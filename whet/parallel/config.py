"""How many ranks a learner has and what each of them holds. Imports no torch: recipes are read with this."""

from pydantic import Field, model_validator

from whet.config import Config


class ParallelConfig(Config):
    """The sizes of a learner's dimensions; their product is its number of ranks. All 1: one process."""

    replicas: int = Field(1, ge=1)
    """Copies of the sharded model (HSDP): gradients are summed over them once per step."""
    fsdp: int = Field(1, ge=1)
    """Ranks that each hold a part of every parameter, and work on data of their own (FSDP2)."""
    context: int = Field(1, ge=1)
    """Ranks that share the tokens of one micro-batch, for sequences too long for one of them."""
    tensor: int = Field(1, ge=1)
    """Ranks that share every matrix and every head of attention; it must divide the model's key-value heads."""
    sequence_parallel: bool = True
    """With ``tensor``: between the matrices, each rank keeps its part of the tokens only (arXiv 2205.05198)."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer stay in the CPU's memory and visit the device layer by layer. Takes at least
    two ranks."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.replicas * self.fsdp * self.ranks_per_shard

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that work on the same data."""
        return self.context * self.tensor

    @model_validator(mode="after")
    def _offload_needs_ranks(self) -> "ParallelConfig":
        if self.cpu_offload and self.ranks == 1:
            raise ValueError("cpu_offload needs at least two ranks, for instance fsdp = 2")
        return self
