"""The memory of one process, in bytes, by kind and by phase of a step. Only arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whet.diagnose.activations import ModelSize
from whet.diagnose.layout import Shard, Stage
from whet.engines.torch.config import TorchGeneratorConfig, usual_prefix_tokens
from whet.learner.config import LearnerConfig
from whet.models.tiled_logprobs import KEPT_BYTES
from whet.parallel.config import ParallelConfig

# Bytes per number of weights and moments; bfloat16 is for computing only.
_MASTER = {"float32": 4, "bfloat16": 4, "float64": 8}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
CUDA_CONTEXT = 600 * 2**20  # per process on its GPU, with the cuBLAS workspace
_BACKWARD = 2  # a layer's backward pass needs this multiple of its activations; measured
_HOLES = 0.13  # share of a layer's activations, for each layer; measured: 0.22 to 0.25 with MKL, up to 0.1 with oneDNN
_BLOCK = 64  # tokens by which the generator's cache grows


@dataclass(slots=True)
class Memory:
    """Bytes by kind: permanent ones, and additional ones in each phase (``learn``, ``generate`` ...)."""

    always: dict[str, int] = field(default_factory=dict)
    phases: dict[str, dict[str, int]] = field(default_factory=dict)

    def peak(self) -> int:
        """Return the bytes in the phase that needs the most."""
        return sum(self.always.values()) + max((sum(kinds.values()) for kinds in self.phases.values()), default=0)

    def merge(self, other: "Memory", of: str = "") -> "Memory":
        """Add ``other`` in the same process and return self. ``of`` names its model; models learn one after another."""
        whose = f" of the {of}" if of else ""
        self.always |= {name + whose: size for name, size in other.always.items()}
        self.phases |= {phase + whose: kinds for phase, kinds in other.phases.items()}
        return self


def resident() -> int:
    """Return the resident bytes of this process after importing torch and transformers, before any model is loaded; 0
    if the system does not report them."""
    import transformers

    assert transformers.AutoModelForCausalLM, "accessing it triggers the lazy import"
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


def learner_memory(
    size: ModelSize,
    config: LearnerConfig,
    parallel: ParallelConfig,
    shard: Shard,
    *,
    stage: Stage | None = None,
    activations: int = 0,
    layer: int = 0,
    trained_tokens: int = 0,
    hidden_states: int = 0,
    reference: int = 0,
    asynchronous: bool = False,
    on_cpu: bool = False,
    moment: int | None = None,
    moments: int | None = None,
) -> Memory:
    """Return the memory of one rank of a learner, at a ``stage`` of its pipeline. ``activations``: bytes of a whole
    micro-batch in the whole model; ``layer``: bytes in one layer; ``trained_tokens``: tokens of a micro-batch whose
    log-probs are computed; ``hidden_states``: numbers in the hidden states of all micro-batches of a step;
    ``reference``: bytes of a frozen reference model; ``asynchronous``: checkpoints are saved from a copy;
    ``on_cpu``: activations are on the heap of the C library, and in float32 the head keeps products; ``moment``: bytes
    per number of AdamW's moments, if they differ from the weights'; ``moments``: their number, if not two for each
    trained parameter."""
    master, computing, stage = _MASTER[config.computes_in], BYTES[config.computes_in], stage or Stage()
    numbers = 2 * shard.updated if moments is None else moments
    always = {"weights": shard.weights, "reference": reference, "optimizer": numbers * (moment or master)}
    if asynchronous:
        always["copy that is saved (CPU)"] = (shard.trained + numbers) * master
    learn: dict[str, int] = {}
    matrix = size.vocabulary * size.hidden // parallel.tensor
    wide = config.computes_in != "bfloat16"
    logits = trained_tokens * size.vocabulary // parallel.tensor * computing
    if shard.trained:
        sharing = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)  # a micro-batch's tokens
        learn = {
            "gradients": shard.trained * master,
            "activations": int(activations * stage.share) // sharing,
            "a layer's backward pass": _BACKWARD * layer // sharing,
            "holes between activations": _holes(size, config, stage, layer) // sharing if on_cpu else 0,
            "head": matrix * stage.last * master,  # its gradient, before it is added
            "the head's products": min(KEPT_BYTES, logits // parallel.context) * stage.last if on_cpu and wide else 0,
            "weights as they are computed with": _casts(size, config, parallel, shard),
            "a matrix, back from 4 bits": shard.restored * master,
            "hidden states between stages": stage.borders * hidden_states // sharing * master,
        }
    whole = config.distributed_optimizer and shard.trained
    if parallel.ranks > 1 and not whole:  # FSDP all-gathers a layer before it computes, even with one rank per stage
        plain = size.largest_layer - size.largest_experts
        learn["gathered layers"] = 2 * computing * (plain // parallel.tensor + size.largest_experts // parallel.expert)
        if shard.trained:  # kept until their gradients are reduced at the end of the backward pass
            whole = stage.first and stage.last
            learn["gathered embeddings"] = master * (size.embedding // parallel.tensor if whole else matrix)
            learn["gathered embeddings"] *= stage.first or stage.last
    return Memory(_nonzero(always), {"learn": _nonzero(learn)} if learn else {})


def _holes(size: ModelSize, config: LearnerConfig, stage: Stage, layer: int) -> int:
    """Return the bytes of the heap that a forward pass leaves unused: what a layer frees lies between what it keeps,
    and is too small for later tensors. With activation checkpointing in bfloat16, and in compiled layers, no such bytes
    were measured."""
    leaves = config.computes_in == "float32" if config.activation_checkpointing else not config.compile
    return int(_HOLES * layer * size.layers * stage.share) if leaves else 0


def _casts(size: ModelSize, config: LearnerConfig, parallel: ParallelConfig, shard: Shard) -> int:
    """Return the bytes of autocast's copies of trained matrices, which live until the end of a forward pass. FSDP
    gathers weights in that dtype; without activation checkpointing the copies are counted as activations."""
    makes = config.computes_in == "bfloat16" and config.activation_checkpointing and parallel.ranks == 1
    return size.linear * BYTES["bfloat16"] if makes and shard.trained >= size.linear else 0


def generator_memory(
    size: ModelSize,
    config: TorchGeneratorConfig,
    *,
    prompts: int,
    answers: int,
    prompt: int,
    answer: int,
    bucket: int,
    in_turns: bool = False,
) -> Memory:
    """Return the memory of the in-process generator while it samples ``answers`` completions of up to ``answer`` tokens
    for ``prompts`` prompts of up to ``prompt`` tokens. A refit sends ``bucket`` bytes at a time, or one larger tensor.
    On a CPU, the weights of linear layers and the head are stored a second time in oneDNN's layout. ``in_turns``: no
    weights are in memory while a learner computes."""
    number = BYTES[config.dtype]
    rows = min(config.max_batch, answers)
    tiles = -(-rows // max(1, answers // max(1, prompts)))
    tile, row = (-(-tokens // _BLOCK) * _BLOCK for tokens in (prompt, answer))
    limit = config.prefix_tokens
    limit = usual_prefix_tokens(size.kv_per_token * number) if limit is None else limit
    prefixes = min(limit, prompts * prompt)
    cached = (-(-config.max_batch // 16) * 16 * row + tiles * tile + prefixes) * size.kv_per_token * number
    if size.state:  # each row has its own copy of the prompt, in addition to the prompts' until their rows start
        cached = (rows + tiles) * ((prompt + answer) * size.kv_per_token + size.state) * number
    packed = size.linear + size.vocabulary * size.hidden
    weights = {"generator weights": (size.parameters + packed * config.packed_weights) * number}
    phases = {"generate": {"KV cache": cached}, "publish": {"bucket": bucket_bytes(size, bucket, number)}}
    if in_turns:
        return Memory({}, {phase: weights | kinds for phase, kinds in phases.items()})
    return Memory(weights, phases)


def bucket_bytes(size: ModelSize, bucket: int, number: int) -> int:
    """Return the bytes of a refit's largest bucket: ``bucket`` bytes as float32, or one larger tensor, converted to
    numbers of ``number`` bytes."""
    return min(size.parameters, max(bucket // 4, size.vocabulary * size.hidden)) * number


def _nonzero(kinds: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in kinds.items() if size}
