"""The memory of one process, in bytes, by kind and by phase of a step. Arithmetic alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whet.diagnose.activations import ModelSize
from whet.diagnose.layout import Held, Stage
from whet.engines.torch.config import TorchGeneratorConfig
from whet.learner.config import LearnerConfig
from whet.parallel.config import ParallelConfig

# Bytes per number of weights and moments; bfloat16 is for computing only.
_MASTER = {"float32": 4, "bfloat16": 4, "float64": 8}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
CUDA_CONTEXT = 600 * 2**20  # of a process on its GPU, with the workspace of its products
_BACKWARD = 2  # times one layer's activations is what its backward pass works with: measured
_BLOCK = 64  # tokens; the generator's cache grows by so many


@dataclass(slots=True)
class Memory:
    """Bytes by kind: those held always, and those held only in a phase (``learn``, ``generate`` ...)."""

    always: dict[str, int] = field(default_factory=dict)
    phases: dict[str, dict[str, int]] = field(default_factory=dict)

    def peak(self) -> int:
        """Return the bytes of the fullest phase."""
        return sum(self.always.values()) + max((sum(kinds.values()) for kinds in self.phases.values()), default=0)

    def merge(self, other: "Memory", of: str = "") -> "Memory":
        """Add ``other`` on the same rank and return self. ``of`` names its model; models learn one after another."""
        whose = f" of the {of}" if of else ""
        self.always |= {name + whose: size for name, size in other.always.items()}
        self.phases |= {phase + whose: kinds for phase, kinds in other.phases.items()}
        return self


def resident() -> int:
    """Return the bytes that this process holds once torch and transformers are imported, before any model. 0 where the
    system doesn't tell."""
    import transformers

    assert transformers.AutoModelForCausalLM, "imported when first used, and only then it counts"
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


def learner_memory(
    size: ModelSize,
    config: LearnerConfig,
    parallel: ParallelConfig,
    held: Held,
    *,
    stage: Stage | None = None,
    activations: int = 0,
    layer: int = 0,
    hidden_states: int = 0,
    reference: int = 0,
    asynchronous: bool = False,
    moment: int | None = None,
) -> Memory:
    """Return the memory of one rank of a learner, at a ``stage`` of its pipeline. ``activations`` are the bytes of a
    whole micro-batch in the whole model, ``layer`` those in one layer; ``hidden_states`` counts the numbers in those of
    all micro-batches of a step; ``reference`` is the bytes of frozen weights held beside; ``asynchronous``: checkpoints
    are saved from a copy; ``moment`` is the bytes of one of AdamW's, where they differ from a weight's."""
    master, computing, stage = _MASTER[config.computes_in], BYTES[config.computes_in], stage or Stage()
    always = {"weights": held.weights, "reference": reference, "optimizer": 2 * held.trained * (moment or master)}
    if asynchronous:
        always["copy that is saved (CPU)"] = 3 * held.trained * master
    learn: dict[str, int] = {}
    matrix = size.vocabulary * size.hidden // parallel.tensor
    if held.trained:
        sharing = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)  # a micro-batch's tokens
        learn = {
            "gradients": held.trained * master,
            "activations": int(activations * stage.share) // sharing,
            "a layer's backward pass": _BACKWARD * layer // sharing,
            "head": matrix * stage.last * master,  # its gradient, before it is added
            "weights as they are computed with": _casts(size, config, parallel, held),
            "hidden states between stages": stage.borders * hidden_states // sharing * master,
        }
    if parallel.ranks > 1:  # FSDP puts a layer together before it computes, also over one rank of a stage
        plain = size.largest_layer - size.largest_experts
        learn["gathered layers"] = 2 * computing * (plain // parallel.tensor + size.largest_experts // parallel.expert)
        if held.trained:  # they stay until their gradients are summed at the end of the backward pass
            whole = stage.first and stage.last
            learn["gathered embeddings"] = master * (size.embedding // parallel.tensor if whole else matrix)
            learn["gathered embeddings"] *= stage.first or stage.last
    return Memory(_there(always), {"learn": _there(learn)} if learn else {})


def _casts(size: ModelSize, config: LearnerConfig, parallel: ParallelConfig, held: Held) -> int:
    """Return the bytes of the copies that autocast makes of trained matrices and keeps until a forward pass ends. FSDP
    gathers them in that type; without recomputation they are among the activations that the backward pass reads."""
    makes = config.computes_in == "bfloat16" and config.activation_checkpointing and parallel.ranks == 1
    return size.linear * BYTES["bfloat16"] if makes and held.trained >= size.linear else 0


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
    to ``prompts`` prompts of up to ``prompt`` tokens. Weights come ``bucket`` bytes at a time, or the largest tensor
    alone. On a CPU the linear layers' weights are held twice in bfloat16, once in oneDNN's order, and in float32 the
    head's. ``in_turns``: no weights are held while a learner computes."""
    number = BYTES[config.dtype]
    rows = min(config.max_batch, answers)
    tiles = -(-rows // max(1, answers // max(1, prompts)))
    tile, own = (-(-tokens // _BLOCK) * _BLOCK for tokens in (prompt, answer))
    known = min(config.prefix_tokens, prompts * prompt)
    cached = (-(-config.max_batch // 16) * 16 * own + tiles * tile + known) * size.kv_per_token * number
    if size.state:  # each row has its prompt for itself; prompts' own are there until their rows begin
        cached = (rows + tiles) * ((prompt + answer) * size.kv_per_token + size.state) * number
    packed = size.linear * (config.dtype == "bfloat16") + size.vocabulary * size.hidden
    weights = {"generator weights": (size.parameters + packed * config.packed_weights) * number}
    phases = {"generate": {"KV cache": cached}, "publish": {"bucket": bucket_bytes(size, bucket, number)}}
    if in_turns:
        return Memory({}, {phase: weights | kinds for phase, kinds in phases.items()})
    return Memory(weights, phases)


def bucket_bytes(size: ModelSize, bucket: int, number: int) -> int:
    """Return the bytes of a refit's largest bucket: ``bucket`` bytes of float32, or the largest tensor alone, in
    numbers of ``number`` bytes."""
    return min(size.parameters, max(bucket // 4, size.vocabulary * size.hidden)) * number


def _there(kinds: Mapping[str, int]) -> dict[str, int]:
    return {name: held for name, held in kinds.items() if held}
