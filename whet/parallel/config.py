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
    expert: int = Field(1, ge=1)
    """Of a mixture of experts: ranks that each have a part of every layer's experts; tokens travel to them. It adds no
    ranks but borrows neighbours from ``fsdp``, ``context`` and ``tensor``, so it must divide their product, and the
    number of experts."""
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
    def _experts_borrow_ranks(self) -> "ParallelConfig":
        if (copy := self.fsdp * self.context * self.tensor) % self.expert:
            raise ValueError(
                f"expert = {self.expert} does not divide fsdp x context x tensor = {copy}, whose ranks it borrows"
            )
        return self

    @model_validator(mode="after")
    def _offload_needs_ranks(self) -> "ParallelConfig":
        if self.cpu_offload and self.ranks == 1:
            raise ValueError("cpu_offload needs at least two ranks, for instance fsdp = 2")
        return self
