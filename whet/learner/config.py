"""The settings of a learner: its implementation, precision and memory. Imports no torch: recipes are read with this."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from whet.config import Config
from whet.core.batch import Output
from whet.learner.optimizer_config import OptimizerConfig
from whet.models.config import AttentionName, DeviceName, ModelConfig
from whet.parallel.config import ParallelConfig

Precision = Literal["float32", "bfloat16", "float64"]
PrecisionSetting = Literal["auto", "float32", "bfloat16", "float64"]
MatmulPrecision = Literal["auto", "highest", "medium"]
Head = Literal["language", "value"]
"""A model's outputs: log-probs of tokens, or a critic's values."""

OUTPUTS: dict[Head, frozenset[Output]] = {
    "language": frozenset({"logprobs", "entropy", "topk", "topk_ids"}),
    "value": frozenset({"values"}),
}
"""The columns that a model can give, by head."""


class ProfileConfig(Config):
    """Steps whose computations in the main learner torch.profiler records, into ``profile/`` of the run folder."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = Field((), max_length=10)
    """The steps, counted from 1."""
    micro_batches: int = Field(4, ge=1, le=64)
    """Micro-batches that are recorded of scoring, and of learning, in each of the steps: a file grows with every
    operation."""


class LearnerConfig(Config):
    """The settings of training, for all algorithms."""

    type: Literal["torch", "megatron"] = "torch"
    """The implementation of layers. ``torch``: transformers', distributed by torch. ``megatron``: Megatron Core's,
    for Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral and DeepSeek-V3, and for Qwen2.5-VL, Qwen3-VL, InternVL, Idefics 3 and
    SmolVLM with images (``whet[megatron]``)."""
    device: DeviceName = "auto"
    """``auto``: a GPU for each rank if there are any. ``cuda`` is an error without a GPU."""
    attention: AttentionName = "auto"
    """The attention implementation. ``blocks``: padded to blocks of similar size. ``varlen``: unpadded, by
    FlashAttention, a shared prompt's keys once for all its answers. ``flex``: by FlexAttention, on GPUs. ``auto``: in
    bfloat16 on a GPU the first of varlen and flex that the model allows and whose trial at the start agrees with plain
    operations."""
    deterministic: bool = False
    """On a GPU, compute bit-identical results each time, more slowly; an operation that can't raises an error. On CPUs
    results are always bit-identical."""
    precision: PrecisionSetting = "auto"
    """``bfloat16`` computes in bfloat16 (autocast) with float32 weights; ``float64`` is for tests. ``auto``: bfloat16
    on GPUs that support it, and on CPUs that multiply the model's shapes at least 1.5 times as fast in bfloat16 as in
    float32, which is measured for half a second when a run starts; otherwise float32."""
    max_tokens: int = Field(8192, gt=0)
    """Maximum number of tokens in a micro-batch. It bounds memory and doesn't change gradients."""
    pack_tokens: int | None = Field(None, gt=0)
    """Short sequences are packed into micro-batches of at most this many tokens; a longer one is a micro-batch alone.
    Smaller values take less memory. None: ``max_tokens``."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more compute."""
    distributed_optimizer: bool = False
    """With ``megatron``: Megatron Core's distributed optimizer in place of FSDP2. The ranks of ``parallel.fsdp`` and
    ``context`` have whole weights and gradients, and each has the moments of its share. Needs AdamW and float32
    weights."""
    balance: float | None = Field(None, ge=0)
    """Mixtures of experts: how far a step moves each router's bias towards even loads (DeepSeek-V3: 0.001), without an
    auxiliary loss. 0: only reports the loads. Applies to the policy."""
    compile: bool = False
    """Compile layers (torch.compile), except for attention itself: slower to start, faster steps. Needs a C++ compiler
    on CPUs, and can't be combined with parallel.tensor or parallel.expert."""
    float8: bool = False
    """Multiply in float8 in the layers, on GPUs that support it (Ada, Hopper and later), with precision=bfloat16 and
    best with compile. Worthwhile from hidden sizes of about 4,096 on. Needs ``whet[torchao]``."""
    max_skipped_steps: int = Field(3, gt=0)
    """The run stops after this many consecutive steps whose loss or gradient is not finite."""
    matmul_precision: MatmulPrecision = "auto"
    """The precision of float32 products. ``auto`` measures at the start, on a CPU, whether ``medium`` is faster with
    the same accuracy; elsewhere it is ``highest``."""
    deadline: float = Field(1800.0, gt=0)
    """Seconds that one call of a worker (a forward pass over a batch, an optimizer step, a save) may take."""

    @property
    def computes_in(self) -> Precision:
        """The precision, once ``auto`` has been resolved."""
        if self.precision == "auto":
            raise ValueError("learner.precision is auto and has not been resolved yet")
        return self.precision

    def fastest(self, precision: Precision, device: str) -> Precision:
        """Return the fastest precision for this type, where ``precision`` is the fastest for torch. Megatron Core's
        layers have no bfloat16 on CPUs."""
        return "float32" if self.type == "megatron" and device == "cpu" else precision

    def problems(self, parallel: ParallelConfig, lora: bool) -> Iterator[str]:
        """Yield the settings that can't be combined with the learner's ranks, or with LoRA."""
        if self.type == "megatron" and (unsupported := list(self._not_with_megatron(parallel))):
            yield (
                f"learner.type = megatron does not support {', '.join(unsupported)}; leave that out, or set "
                "learner.type=torch"
            )
        if self.distributed_optimizer:
            yield from self._problems_of_distributed_optimizer(parallel)
        if self.float8 and (self.precision not in ("auto", "bfloat16") or parallel.ranks > 1 or lora):
            yield "learner.float8 = true needs precision = bfloat16, one rank, and no LoRA"
        for key, ranks in (("tensor", parallel.tensor), ("expert", parallel.expert)):
            if self.compile and ranks > 1:
                yield (
                    f"learner.compile = true compiles layers, but parallel.{key} = {ranks} splits "
                    "them; leave one of them out"
                )

    def _problems_of_distributed_optimizer(self, parallel: ParallelConfig) -> Iterator[str]:
        what = "learner.distributed_optimizer = true"
        if self.type != "megatron":
            yield f"{what} is Megatron Core's; set learner.type=megatron, or leave it out: parallel.fsdp shards more"
        if parallel.fsdp * parallel.context == 1:
            yield (
                f"{what} shares moments among the ranks of parallel.fsdp and context, but both are 1; set "
                "parallel.fsdp=2 or more, or leave it out"
            )
        if self.precision == "float64":
            yield f"{what} is for weights in float32, not learner.precision = float64; leave one of them out"

    def _not_with_megatron(self, parallel: ParallelConfig) -> Iterator[str]:
        set_here = {"compile": self.compile, "float8": self.float8, "balance": self.balance is not None}
        set_here["deterministic"] = self.deterministic
        set_here[f"attention = {self.attention}"] = self.attention not in ("auto", "blocks")
        yield from (f"learner.{name}" for name, present in set_here.items() if present)
        if parallel.cpu_offload:
            yield "parallel.cpu_offload"


class WorkerConfig(Config):
    """The settings from which a worker of a learner is built."""

    model: ModelConfig
    learner: LearnerConfig = LearnerConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig | None = None
    """None: the model is frozen and only scores."""
    head: Head = "language"
    """The outputs: log-probs of tokens, or a critic's values."""
    steps: int = Field(0, ge=0)
    """Optimizer steps of the whole run, at which a schedule ends."""
    seed: int = 0
    follows_routes: bool = False
    """True for the policy: its routers use the generator's experts if a batch has them."""
    dumps: Path | None = None
    """Folder for dumps of skipped steps, for replay. None: no dumps."""
