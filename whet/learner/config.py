"""The settings of a learner: precision and memory, and the optimizer. Imports no torch: recipes are read with this."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from whet.config import Config
from whet.core.batch import Output
from whet.models.config import AttentionName, DeviceName
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


class LearnerConfig(Config):
    """The settings of training, whatever is trained on."""

    device: DeviceName = "auto"
    """``auto``: a GPU for each rank where there are any. ``cuda`` is an error without one."""
    attention: AttentionName = "auto"
    """How segments attend. ``blocks``: padded to blocks of similar size. ``varlen``: unpadded, by FlashAttention, a
    shared prompt's keys once for all its answers. ``flex``: by FlexAttention, on GPUs. ``auto``: in bfloat16 on a GPU
    the first of varlen and flex that the model allows and whose trial at the start agrees with plain operations."""
    deterministic: bool = False
    """On a GPU, compute the same bits each time, more slowly; an operation that can't raises an error. On CPUs the bits
    are the same anyway."""
    precision: PrecisionSetting = "auto"
    """``bfloat16`` computes in bfloat16 (autocast) over float32 weights; ``float64`` is for tests. ``auto``: bfloat16
    where the machine multiplies the model's shapes at least 1.5 times as fast in it as in float32, which is measured
    for half a second when a run starts, and on GPUs that have it; else float32."""
    max_tokens: int = Field(8192, gt=0)
    """Most tokens of one micro-batch. It bounds memory and changes no gradient."""
    pack_tokens: int | None = Field(None, gt=0)
    """Tokens up to which short sequences are packed into one micro-batch; a longer one is a micro-batch alone. Fewer
    take less memory. None: ``max_tokens``."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more compute."""
    balance: float | None = Field(None, ge=0)
    """Mixtures of experts: how far a step moves each router's bias towards even loads (DeepSeek-V3: 0.001), without a
    loss for it. 0: only reports the loads. It is the policy's."""
    compile: bool = False
    """Compile layers (torch.compile), all but attention itself: slower to start, faster steps. Needs a C++ compiler on
    CPUs and neither parallel.tensor nor parallel.expert."""
    float8: bool = False
    """Multiply in float8 in the layers, on GPUs that can (Ada, Hopper and later), with precision=bfloat16 and best with
    compile. It pays from hidden sizes of about 4,096 on. Needs ``whet[torchao]``."""
    max_skipped_steps: int = Field(3, gt=0)
    """So many steps in a row with a loss or gradient that is not finite end the run."""
    matmul_precision: MatmulPrecision = "auto"
    """How float32 products are computed. ``auto`` measures at the start, on a CPU, whether ``medium`` is faster at the
    same accuracy; elsewhere it is ``highest``."""
    deadline: float = Field(1800.0, gt=0)
    """Seconds that one call of a worker (a forward pass over a batch, an optimizer step, a save) may take."""

    @property
    def computes_in(self) -> Precision:
        """``precision``, once it is decided."""
        if self.precision == "auto":
            raise ValueError("learner.precision is auto, and nothing has decided yet what that is")
        return self.precision

    def problems(self, parallel: ParallelConfig, lora: bool) -> Iterator[str]:
        """Name what does not go together with the ranks that the learner has, or with LoRA."""
        if self.float8 and (self.precision not in ("auto", "bfloat16") or parallel.ranks > 1 or lora):
            yield "learner.float8 = true needs precision = bfloat16, one rank, and no LoRA"
        for key, ranks in (("tensor", parallel.tensor), ("expert", parallel.expert)):
            if self.compile and ranks > 1:
                yield (
                    f"learner.compile = true compiles layers, and parallel.{key} = {ranks} cuts "
                    "them; leave one of them out"
                )


class OptimizerConfig(Config):
    """AdamW (arXiv 1711.05101) with a warm-up and a schedule."""

    lr: float = Field(1e-6, ge=0)
    """The learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    moments: Literal["float32", "8bit"] = "float32"
    """``8bit``: in blocks of 256 numbers of a byte each, with a scale (arXiv 2110.02861): 6 bytes less for each
    parameter, on one rank. Needs ``whet[torchao]`` and a compiler, as ``learner.compile`` does."""
    weight_decay: float = Field(0.0, ge=0)
    """Of parameters with two or more dimensions (matrices, embeddings, LoRA's A and B), not of norms or biases."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient of the whole step is scaled down to this norm."""
    warmup_steps: int = Field(0, ge=0)
    """The learning rate rises linearly; the first step has ``lr / warmup_steps``."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, towards ``min_lr_ratio * lr`` at the last step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)

    def problems(self, parallel: ParallelConfig) -> Iterator[str]:
        """Name what does not go together with the ranks that the learner has."""
        if self.moments == "8bit" and parallel.ranks > 1:
            yield f"optimizer.moments = 8bit is for one rank, and there are {parallel.ranks}; leave one of them out"
