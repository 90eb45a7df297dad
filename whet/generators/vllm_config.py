"""The settings of the generator on vLLM. Apart from it, so that a recipe is read without torch or vLLM."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from whet.config import Config

if TYPE_CHECKING:
    from whet.generators.vllm_generator import VllmGenerator

_VOCABULARY = 64  # vLLM fills the vocabulary up to a multiple of it
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


@dataclass(frozen=True)
class Adapters:
    """Of LoRA adapters that an engine is to apply, of which there is one at a time."""

    rank: int
    modules: tuple[str, ...]  # the ends of their names


def slot_rank(rank: int) -> int:
    """The rank that vLLM makes room for, into which one of ``rank`` goes."""
    return min(room for room in _LORA_RANKS if room >= rank)


class VllmGeneratorConfig(Config):
    """How a vLLM engine runs, in processes of its own on this machine."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_batch: int = Field(default=64, ge=1)
    """Completions decoded side by side; more requests wait in a queue."""
    max_context: int = Field(default=4096, ge=2)
    """Most tokens of prompt and completion together."""
    prefill_tokens: int = Field(default=4096, ge=1)
    """Most tokens in one forward; a longer prompt takes several."""
    cache_gib: float = Field(default=1.0, gt=0)
    """Memory of the engine for keys and values, in GiB; its ranks share it."""
    tensor: int = Field(default=1, ge=1)
    """Ranks of the engine, processes that share every matrix and every head of attention: for a model that is too large
    or too slow for one device. It must divide the model's heads."""
    devices: str | None = Field(default=None, min_length=1)
    """The GPUs of the engine, one for each of its ranks, as CUDA_VISIBLE_DEVICES says it ("1", or "2,3" with
    ``tensor`` 2). Has to be set where there are GPUs: the learner computes on the first ones. With
    ``devices.placement=colocated`` name the learner's own ("0")."""
    threads: int | None = Field(default=None, ge=1)
    """Of the engine's products on CPUs, divided among its ranks; None: one for each core that this process may use."""
    compile: bool = False
    """Compile the model (on GPUs also capture graphs): slower to start, faster to sample."""
    deadline: float = Field(default=300.0, gt=0)
    """Seconds without progress after which a wait is an error."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds that the engine may take to start."""

    @model_validator(mode="after")
    def _a_device_for_each_rank(self) -> "VllmGeneratorConfig":
        if self.devices is not None and len(self.devices.split(",")) != self.tensor:
            raise ValueError(
                f"devices = {self.devices!r} names {len(self.devices.split(','))}, and an engine with tensor = "
                f"{self.tensor} takes {self.tensor}: one for each rank"
            )
        return self

    def cannot_divide(self, model_config: Any) -> str | None:
        """What of a model (its transformers config) the engine's ranks can't share evenly, in words."""
        text, ranks = model_config.get_text_config(), self.tensor
        heads = text.num_attention_heads
        shared = getattr(text, "num_key_value_heads", None) or heads
        if heads % ranks:
            return f"{heads} heads"
        if shared % ranks and ranks % shared:  # with fewer of these than ranks, each is held by several ranks
            return f"{shared} key-value heads"
        for name in ("intermediate_size", "moe_intermediate_size"):
            size = getattr(text, name, None)
            if isinstance(size, int) and size % ranks:
                return f"{name} {size}"
        padded = -(-text.vocab_size // _VOCABULARY) * _VOCABULARY
        return f"vocabulary, which vLLM fills up to {padded} rows" if padded % ranks else None

    def cannot_adapt(self, rank: int) -> str | None:
        """Why LoRA of this rank can't be applied beside the matrices, in words."""
        most = _LORA_RANKS[-1]
        return None if rank <= most else f"a rank of {rank}; vLLM applies LoRA of a rank of at most {most}"

    def build(self, model_config: Any, tokenizer: Any) -> "VllmGenerator":
        """A generator for models of a transformers config. Its weights are still to be published. The engine starts
        when it is first needed. Raises ``ConfigError`` where vLLM is not installed, where ``tensor`` ranks can't share
        the model, or where there are GPUs and ``devices`` does not say which."""
        import importlib.util

        from whet.errors import ConfigError

        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "generator.type=vllm needs vLLM, which is not installed here. Run make install-vllm (docs/vllm.md says "
                "what that does), or sample with generator=torch"
            )
        what = self.cannot_divide(model_config)
        if what is not None:
            raise ConfigError(f"generator.tensor = {self.tensor} does not divide the model's {what}: choose another")
        import torch

        if self.devices is None and torch.cuda.is_available():
            raise ConfigError(
                "generator.devices is not set: the vLLM engine would take the GPU that the learner computes on. Say "
                "which ones are the engine's, one for each of its ranks: generator.devices='\"1\"' is the second. With "
                "devices.placement=colocated they are the learner's own: generator.devices='\"0\"'"
            )
        from whet.generators.vllm_generator import VllmGenerator

        return VllmGenerator(self, model_config, tokenizer)
