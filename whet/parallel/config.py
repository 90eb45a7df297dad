"""The sizes of a learner's parallel dimensions. Imports no torch: recipes are read with this."""

from pydantic import Field, model_validator

from whet.config import Config


class ParallelConfig(Config):
    """The sizes of a learner's parallel dimensions; their product is its number of ranks. All 1: one process."""

    replicas: int = Field(1, ge=1)
    """Copies of the sharded model (HSDP): gradients are summed over them once per step."""
    fsdp: int = Field(1, ge=1)
    """Ranks that each hold a shard of every parameter and work on different data (FSDP2)."""
    pipeline: int = Field(1, ge=1)
    """Ranks that each hold some of the layers; micro-batches pass through them in order."""
    stages_per_rank: int = Field(1, ge=1)
    """With ``pipeline``: number of stages on each rank. 1: the schedule 1F1B (arXiv 2006.09503). More: the interleaved
    schedule (arXiv 2104.04473), in which ranks wait less for each other and communicate more."""
    context: int = Field(1, ge=1)
    """Ranks that split the tokens of a micro-batch, for sequences that are too long for one rank."""
    tensor: int = Field(1, ge=1)
    """Ranks that split every matrix and the attention heads; must divide the model's number of key-value heads."""
    expert: int = Field(1, ge=1)
    """For mixture-of-experts models: ranks that split the experts of every layer; tokens are sent to them. It adds no
    ranks but uses neighbouring ranks of ``fsdp``, ``context`` and ``tensor``, so it must divide their product, and the
    number of experts."""
    sequence_parallel: bool = True
    """With ``tensor``: between the matrices, each rank keeps only its part of the tokens (arXiv 2205.05198)."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state stay in CPU memory and are copied to the device layer by layer. Needs
    at least two ranks."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.replicas * self.fsdp * self.ranks_per_shard

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that work on the same data."""
        return self.context * self.pipeline * self.tensor

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.pipeline * self.stages_per_rank

    @model_validator(mode="after")
    def _experts_borrow_ranks(self) -> "ParallelConfig":
        if (copy := self.fsdp * self.context * self.tensor) % self.expert:
            raise ValueError(
                f"expert = {self.expert} does not divide fsdp x context x tensor = {copy}, whose ranks it uses"
            )
        return self

    @model_validator(mode="after")
    def _ranks_are_enough(self) -> "ParallelConfig":
        if self.cpu_offload and self.ranks == 1:
            raise ValueError("cpu_offload needs at least two ranks, for instance fsdp = 2")
        if self.stages_per_rank > 1 and self.pipeline == 1:
            raise ValueError("stages_per_rank needs a pipeline of at least two ranks, for instance pipeline = 2")
        return self
