"""Bytes that one rank holds, by kind and by phase of a step, for a model of a given size. Arithmetic alone."""

from dataclasses import dataclass, field

from whet.generators.torch_config import TorchGeneratorConfig
from whet.learner.config import LearnerConfig
from whet.plan.model import ModelSize

_WIDE = {"float32": 4, "bfloat16": 4, "float64": 8}  # bytes of a number that the learner keeps: bfloat16 only computes
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_BACKWARD = 2  # times one layer's activations is what its backward pass works with: measured
_BLOCK = 64  # tokens; the generator's cache grows by so many


@dataclass(slots=True, frozen=True)
class Shares:
    """Over how many ranks a model's parameters are spread, and the part of a micro-batch that one rank computes."""

    dense: int = 1
    experts: int = 1
    gathered: bool = False  # a layer is put together before it computes (FSDP)
    tokens: int = 1  # tensor (with sequence parallelism) and context ranks share the tokens of a micro-batch
    matrices: int = 1  # tensor ranks share every matrix
    expert: int = 1  # ranks that share the experts of a layer


@dataclass(slots=True, frozen=True)
class Held:
    """What one rank holds of a model's parameters, where that was counted (see ``whet.plan.layout``)."""

    weights: int  # bytes
    trained: int  # numbers


@dataclass(slots=True)
class Memory:
    """Bytes by kind. ``learn`` and so on name the phase in which a kind is there; what is always there is in all."""

    always: dict[str, int] = field(default_factory=dict)
    phases: dict[str, dict[str, int]] = field(default_factory=dict)

    def peak(self) -> int:
        """Of the fullest phase."""
        return sum(self.always.values()) + max((sum(kinds.values()) for kinds in self.phases.values()), default=0)

    def merge(self, other: "Memory", of: str = "") -> "Memory":
        """What both hold on the same rank; returns self. ``of`` names whose it is: models learn one after another."""
        whose = f" of the {of}" if of else ""
        self.always |= {name + whose: size for name, size in other.always.items()}
        self.phases |= {phase + whose: kinds for phase, kinds in other.phases.items() if kinds}
        return self


def learner_memory(
    size: ModelSize,
    config: LearnerConfig,
    shares: Shares,
    *,
    activations: int,
    layer: int = 0,
    travelling: int = 0,
    trains: bool = True,
    lora: bool = False,
    reference: bool = False,
    saves_behind: bool = False,
    held: Held | None = None,
) -> Memory:
    """One rank of a learner. ``activations`` are those of a whole micro-batch, and of one ``layer``; ``travelling``
    counts the numbers for which a pipeline has room, hidden states and their gradients of all micro-batches of a step.
    Without ``held`` the rank's part of the parameters is what ``shares`` make of the model's ``size``."""
    wide, narrow = _WIDE[config.precision], BYTES[config.precision]
    local = (size.parameters - size.experts) // shares.dense + size.experts // shares.experts
    trained = (size.adapters // shares.dense if lora else local) if trains else 0
    rounded = size.linear + size.experts
    frozen = rounded * narrow + (size.parameters - rounded) * wide  # see whet.learner.precision.shrink
    memory = Memory(always={"weights": local * wide if trains else frozen // shares.dense})
    if lora:
        memory.always["weights"] += size.adapters // shares.dense * wide
    if held is not None:
        memory.always["weights"], trained = held.weights, held.trained if trains else 0
    if reference and not lora:
        memory.always["reference"] = frozen // shares.dense
    if trains:
        memory.always["optimizer"] = 2 * trained * wide
        if saves_behind:
            memory.always["copy that is saved (CPU)"] = 3 * trained * wide
    learning: dict[str, int] = {}
    if trains:
        learning = {"gradients": trained * wide, "activations": activations // shares.tokens}
        learning["a layer's backward pass"] = _BACKWARD * layer // shares.tokens
        learning["head"] = size.vocabulary * size.hidden // shares.matrices * wide  # its gradient, before it is added
        if travelling:
            learning["hidden states between stages"] = travelling // shares.tokens * wide
    if shares.gathered:
        gathered = (
            size.largest_layer - size.largest_experts
        ) // shares.matrices + size.largest_experts // shares.expert
        learning["gathered layers"] = 2 * gathered * narrow
        if trains:  # they stay from the forward pass to the end of the backward pass, where their gradients are summed
            learning["gathered embeddings"] = size.embedding // shares.matrices * wide
    memory.phases["learn"] = learning
    return memory


def generator_memory(
    size: ModelSize, config: TorchGeneratorConfig, *, prompts: int, answers: int, prompt: int, answer: int, bucket: int
) -> Memory:
    """The in-process generator, with ``answers`` completions of up to ``answer`` tokens to ``prompts`` prompts of up to
    ``prompt`` tokens under way; weights come ``bucket`` bytes at a time, or the largest tensor alone. On a CPU the
    linear layers' weights are held twice, once in oneDNN's order."""
    number = BYTES[config.dtype]
    rows = min(config.max_batch, answers)
    each = max(1, answers // max(1, prompts))
    tiles = -(-rows // each)
    tile = -(-prompt // _BLOCK) * _BLOCK
    own = -(-answer // _BLOCK) * _BLOCK
    known = min(config.prefix_tokens, prompts * prompt)
    cached = (-(-config.max_batch // 16) * 16 * own + tiles * tile + known) * size.kv_per_token * number
    weights = (size.parameters + size.linear) * number
    publish = {"bucket": min(size.parameters, max(bucket // 4, size.vocabulary * size.hidden)) * number}
    return Memory(always={"generator weights": weights}, phases={"generate": {"KV cache": cached}, "publish": publish})
