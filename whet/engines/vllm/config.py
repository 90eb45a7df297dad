"""The settings of the generator on vLLM. Apart from it, so that a recipe is read without torch or vLLM."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from whet.base.dtype import FileDtype
from whet.base.errors import ConfigError
from whet.base.extras import MissingExtraError
from whet.config import Component
from whet.core.types import Distribution
from whet.engines.config import Deployment, GeneratorConfig
from whet.engines.vllm.speculative import SPECULATIVE, Speculative

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from whet.cluster.config import ClusterConfig, DevicesConfig
    from whet.engines.vllm.generator import VllmGenerator

CPU_CACHE_GIB = 1.0
_VOCABULARY = 64  # vLLM fills the vocabulary up to a multiple of it
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM has room for."""
_GUESSES = (
    "generator.speculative needs GPUs (generator.devices): on CPUs vLLM 0.32 divides by a temperature that it never "
    "wrote where a guess is turned down, and so samples from another distribution"
)


class VllmGeneratorConfig(GeneratorConfig):
    """The settings of a vLLM engine, which runs in processes of its own."""

    dtype: Literal["auto"] | FileDtype = "auto"
    """In which it computes. ``auto``: as ``learner.precision`` chooses; bfloat16 with ``quantization``."""
    max_batch: int = Field(default=256, ge=1, le=100_000)
    """Completions decoded side by side; more requests wait in a queue."""
    prefill_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in one forward; a longer prompt takes several. None: 8192 on GPUs, 4096 on CPUs."""
    cache_gib: float | None = Field(default=None, gt=0)
    """Memory of each replica for keys and values, in GiB; its ranks share it. None: on GPUs nine tenths of what is free
    there when the engine starts, less the model and what it works with; on CPUs 1."""
    quantization: Literal["fp8"] | None = None
    """Compute with 8-bit weights, a scale for each output, and inputs, a scale for each token: half the memory, and up
    to twice as fast on GPUs since Ada and Hopper. Weights come in ``dtype`` and are quantized anew at each refit; head
    and embeddings are not. Rollouts are then corrected by importance sampling unless the recipe says otherwise."""
    kv_dtype: Literal["fp8"] | None = None
    """The type of keys and values in the cache. None: ``dtype``."""
    speculative: Annotated[Speculative, Component(SPECULATIVE)] | None = None
    """Guess several tokens and check them at once: ``ngram``, or ``{type: draft, model: ...}``."""
    sleep_level: Literal[1, 2] = 1
    """With ``devices.placement=colocated``, what becomes of the weights while the learner computes: 1 keeps them in the
    memory of the CPU; 2 drops them, for new ones come before anything is sampled again."""
    prefix_caching: bool = True
    """Keep the keys and values of what was computed for later requests that begin alike, as long as there is room."""
    tensor: int = Field(default=1, ge=1)
    """Ranks of each replica, processes that share every matrix and every head of attention: for a model that is too
    large or too slow for one device. It must divide the model's heads."""
    devices: str | None = Field(default=None, min_length=1)
    """The GPUs of the engine, one for each rank, as this process counts them (or by UUID): "1"; with ``tensor`` 2
    "2,3"; with 2 replicas of 2 ranks "4,5,6,7", of which the first has 4 and 5. Has to be set where there are GPUs: the
    learner computes on the first ones. With ``devices.placement=colocated`` name the learner's own ("0")."""
    threads: int | None = Field(default=None, ge=1)
    """Of each replica's products on CPUs, divided among its ranks; None: one for each core of this process."""
    compile: bool | None = None
    """Compile the model (on GPUs also capture graphs): slower to start, faster to sample. None: on GPUs."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds that an engine may take to start."""

    @property
    def ranks(self) -> int:
        return self.tensor

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(self.devices.split(",")) if self.devices else ()

    @property
    def needs_dtype(self) -> Literal["bfloat16"] | None:
        return "bfloat16" if self.quantization else None

    @property
    def narrow(self) -> str | None:
        return "quantization" if self.quantization else "kv_dtype" if self.kv_dtype else None

    @model_validator(mode="after")
    def _fits_together(self) -> "VllmGeneratorConfig":
        if self.quantization and self.dtype == "float32":
            raise ValueError(f"quantization = {self.quantization} computes in bfloat16 or float16; set dtype")
        return self

    @model_validator(mode="after")
    def _a_device_for_each_rank(self) -> "VllmGeneratorConfig":
        wanted = self.tensor * self.replicas
        if self.gpus and len(self.gpus) != wanted:
            raise ValueError(
                f"devices = {self.devices!r} names {len(self.gpus)}, and replicas = {self.replicas} with tensor = "
                f"{self.tensor} take {wanted}: one for each rank"
            )
        return self

    def problems(self, cluster: "ClusterConfig", devices: "DevicesConfig") -> Iterator[str]:
        yield from super().problems(cluster, devices)
        if self.speculative is not None and not self.gpus and not self.on_cluster:
            yield _GUESSES

    def cannot_run(self, model: "PretrainedConfig") -> str | None:
        """Return what of the model the ranks of an engine can't share evenly."""
        text, ranks = model.get_text_config(), self.tensor
        heads = text.num_attention_heads
        shared = getattr(text, "num_key_value_heads", None) or heads
        sizes = {f"{heads} heads": heads}
        if ranks % shared:  # with fewer key-value heads than ranks, each is held by several ranks
            sizes[f"{shared} key-value heads"] = shared
        for name in ("intermediate_size", "moe_intermediate_size"):
            size = getattr(text, name, None)
            if isinstance(size, int):
                sizes[f"{name} {size}"] = size
        padded = -(-text.vocab_size // _VOCABULARY) * _VOCABULARY
        sizes[f"vocabulary, which vLLM fills up to {padded} rows"] = padded
        uneven = next((what for what, size in sizes.items() if size % ranks), None)
        return uneven and f"generator.tensor = {ranks} does not divide the model's {uneven}; choose another"

    def cannot_sample(self, distribution: Distribution) -> str | None:
        if self.speculative is not None and distribution.min_p:
            return "vLLM can't guess tokens ahead (generator.speculative) with sampling.min_p; leave one of them out"
        return None

    def cannot_adapt(self, rank: int) -> str | None:
        if self.sleep_level == 2:
            return "generator.sleep_level = 2 drops the frozen weights, which come only once"
        return f"vLLM applies LoRA of a rank of at most {LORA_RANKS[-1]}" if rank > LORA_RANKS[-1] else None

    def memory(self, weights: int) -> dict[str, int]:
        weights //= 2 if self.quantization else 1
        whole = bool(self.gpus) or self.on_cluster  # of a GPU it takes what else is left
        known = self.cache_gib or (0.0 if whole else CPU_CACHE_GIB)
        return super().memory(weights) | {"KV cache": int(known * 2**30) // self.tensor}

    def build_replica(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> "VllmGenerator":
        """Return an engine that starts when it is first needed. Raises ``ConfigError`` where vLLM is not installed, its
        ranks can't share the model, or there are GPUs and ``devices`` does not say which."""
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtraError(
                "generator.type=vllm needs 'vllm', which is not installed: pip install 'whet[vllm]' on a machine "
                "with GPUs, make install-vllm elsewhere (docs/vllm.md); or sample with generator=torch"
            )
        problem = self.cannot_run(model)
        if problem is not None:
            raise ConfigError(problem)
        import torch

        if not deployment.gpus and torch.cuda.is_available():
            raise ConfigError(
                "generator.devices is not set: the vLLM engine would take the GPU that the learner computes on. Say "
                "which ones are the engine's, one for each of its ranks: generator.devices='\"1\"' is the second. With "
                "devices.placement=colocated they are the learner's own: generator.devices='\"0\"'"
            )
        if self.speculative is not None and not deployment.gpus:
            raise ConfigError(_GUESSES)
        from whet.engines.vllm.generator import VllmGenerator

        return VllmGenerator(self, model, tokenizer, deployment)
