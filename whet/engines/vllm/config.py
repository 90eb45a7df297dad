"""The settings of the generator on vLLM, in a separate module so that a recipe is read without torch or vLLM."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from whet.base.errors import ConfigError
from whet.base.extras import MissingExtraError
from whet.base.lazy import FileDtype
from whet.base.strict_json import JsonObject
from whet.config import Component
from whet.core.types import Distribution
from whet.engines.adapters import BASE, FrozenAdapter, linear_layers, read_adapters
from whet.engines.config import Deployment, GeneratorConfig, Guesses, NGram
from whet.fetch.model import absolute_path
from whet.models.layer_heads import heads_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from whet.cluster.config import ClusterConfig, DevicesConfig
    from whet.engines.vllm.generator import VllmGenerator

CPU_CACHE_GIB = 1.0
_VOCABULARY = 64  # vLLM pads the vocabulary to a multiple of this
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM supports."""
WITH_IMAGES = (
    "gemma3", "gemma4", "idefics3", "internvl", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip
"""The types of models that read images in vLLM as they do in the learner, which tests compare."""
_GUESSES = (
    "generator.speculative needs GPUs (generator.devices): on CPUs vLLM 0.32 divides by an uninitialised "
    "temperature when it rejects a guess, and so samples from another distribution"
)


def check_images(model: "PretrainedConfig") -> None:
    """Raise ``ConfigError`` if it isn't known that vLLM reads the images of a model as the learner does."""
    if model.model_type not in WITH_IMAGES:
        raise ConfigError(
            f"vLLM reads images with {', '.join(WITH_IMAGES)}, not with {model.model_type}; set generator=torch, or "
            "leave model.vision out"
        )
    text: Any = model.get_text_config()
    if model.model_type == "qwen3_vl_moe" and not getattr(text, "norm_topk_prob", False):
        raise ConfigError(
            "vLLM lets the shares of the chosen experts add up to 1 only with text_config.norm_topk_prob = true, which "
            "the learner always does: write it into the model's config.json, or set generator=torch"
        )
    window, size = getattr(text, "sliding_window", None), getattr(model, "mm_tokens_per_image", 0)
    whole = model.model_type == "gemma3"
    if model.model_type == "gemma4":
        size = _size_in_gemma_4(model)
        whole = text.use_bidirectional_attention == "vision"
    if whole and window and size > window:
        raise ConfigError(
            f"an image has {size} tokens, and layers of the model see {window} (sliding_window), where vLLM lets the "
            "tokens of an image not attend to all of it; set generator=torch"
        )


def _size_in_gemma_4(model: Any) -> int:
    """Return the tokens of an image in Gemma 4. Raises ``ConfigError`` where vLLM embeds it in another way."""
    size: int | None = getattr(model.vision_config, "default_output_length", None)
    if size is None:
        raise ConfigError(
            "vLLM counts the tokens of an image by vision_config.default_output_length, which the model's config.json "
            "doesn't have: write it there (max_soft_tokens of the model's processor), or set generator=torch"
        )
    text = model.get_text_config()
    if text.hidden_size_per_layer_input and text.pad_token_id != 0:
        raise ConfigError(
            f"layers of the model embed the tokens of images again, in vLLM as token 0 and in the learner as "
            f"pad_token_id, which is {text.pad_token_id}; set generator=torch"
        )
    return size


class Speculative(Guesses, ABC):
    """The source of guesses. The model accepts as many as agree with its own sampling, so that samples keep its
    distribution and log-probs."""

    @abstractmethod
    def settings(self) -> JsonObject:
        """Return vLLM's ``speculative_config``, without the number of tokens."""


class VllmNGram(NGram, Speculative):
    """``NGram`` for vLLM."""

    def settings(self) -> dict[str, object]:
        return {"method": "ngram", "prompt_lookup_max": self.longest, "prompt_lookup_min": self.shortest}


class Draft(Speculative):
    """A smaller model with the same vocabulary, which is not trained: the further the policy moves, the fewer of its
    guesses are accepted."""

    model: str = Field(min_length=1)
    """The draft model's folder, its name on the Hub, or an artifact."""

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        return absolute_path(model)

    def settings(self) -> JsonObject:
        return {"method": "draft_model", "model": self.model, "draft_load_config": {"load_format": "auto"}}


SPECULATIVE = {"ngram": f"{__name__}:VllmNGram", "draft": f"{__name__}:Draft"}
"""The kinds by their names in recipes."""


class VllmGeneratorConfig(GeneratorConfig):
    """The settings of a vLLM engine, which runs in separate processes."""

    pauses: ClassVar[bool] = True
    serves_adapters: ClassVar[bool] = True

    dtype: Literal["auto"] | FileDtype = "auto"
    """The dtype of its computations. ``auto``: as ``learner.precision`` chooses; bfloat16 with ``quantization``."""
    max_batch: int = Field(default=256, ge=1, le=100_000)
    """Maximum number of completions decoded at once; more requests wait in a queue."""
    prefill_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one forward pass; a longer prompt takes several. None: 8192 on GPUs, 4096 on CPUs."""
    cache_gib: float | None = Field(default=None, gt=0)
    """Size of each replica's KV cache in GiB, shared by its ranks. None: on GPUs nine tenths of the free memory when
    the engine starts, minus the model and its working memory; on CPUs 1."""
    quantization: Literal["fp8"] | None = None
    """Compute with 8-bit weights, with a scale for each output, and 8-bit inputs, with a scale for each token: half the
    memory, and up to twice as fast on GPUs since Ada and Hopper. Weights are sent in ``dtype`` and quantized at each
    refit, except for head and embeddings. Rollouts are then corrected by importance sampling, unless the recipe sets
    another correction."""
    kv_dtype: Literal["fp8"] | None = None
    """The dtype of the KV cache. None: ``dtype``."""
    speculative: Annotated[Speculative, Component(SPECULATIVE)] | None = None
    """Guess several tokens and verify them at once: ``ngram``, or ``{type: draft, model: ...}``."""
    sleep_level: Literal[1, 2] = 1
    """With ``devices.placement=colocated``, where the weights are while the learner computes: 1 keeps them in CPU
    memory; 2 drops them, because new ones are loaded before anything is sampled again."""
    prefix_caching: bool = True
    """Use a prefix cache for later requests with a common prefix, as long as there is room."""
    tensor: int = Field(default=1, ge=1)
    """Ranks of each replica: processes that share every matrix and all attention heads, for a model that is too large
    or too slow for one device. It must divide the model's heads."""
    adapters: dict[Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*$")], str] = Field(default={})
    """Frozen LoRA adapters by name, each a folder in peft's form, which judges, simulated users and opponents are asked
    under (``policy:NAME``) in the same engine. Needs ``weights.lora=adapter``."""
    devices: str | None = Field(default=None, min_length=1)
    """The GPUs of the engine, one for each rank, as numbered in this process (or by UUID): "1"; with ``tensor`` 2
    "2,3"; with 2 replicas of 2 ranks "4,5,6,7", of which the first has 4 and 5. Required if there are GPUs: the learner
    uses the first ones. With ``devices.placement=colocated`` name the learner's GPUs ("0")."""
    threads: int | None = Field(default=None, ge=1, le=10_000)
    """Threads of each replica's products on CPUs, divided among its ranks; None: one for each core of this process."""
    compile: bool | None = None
    """Compile the model (on GPUs also capture graphs): slower to start, faster to sample. None: on GPUs only."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds that an engine may take to start."""

    @property
    def ranks(self) -> int:
        return self.tensor

    @field_validator("adapters")
    @classmethod
    def _folders(cls, adapters: dict[str, str]) -> dict[str, str]:
        if BASE in adapters:
            raise ValueError(f"{BASE!r} is the model without an adapter; choose another name")
        return {name: absolute_path(folder) for name, folder in adapters.items()}

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self.adapters)

    @property
    def refuses_likeliest(self) -> str | None:
        return None if self.speculative is None else "generator.speculative"

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(self.devices.split(",")) if self.devices else ()

    @property
    def needs_dtype(self) -> Literal["bfloat16"] | None:
        return "bfloat16" if self.quantization else None

    @property
    def low_precision_setting(self) -> str | None:
        return "quantization" if self.quantization else "kv_dtype" if self.kv_dtype else None

    @property
    def refuses_images(self) -> str | None:
        if self.tensor > 1:
            return f"generator.tensor = {self.tensor}"
        return f"generator.quantization = {self.quantization}" if self.quantization else None

    @model_validator(mode="after")
    def _fits_together(self) -> "VllmGeneratorConfig":
        if self.quantization and self.dtype == "float32":
            raise ValueError(f"quantization = {self.quantization} computes in bfloat16 or float16; set dtype")
        return self

    @model_validator(mode="after")
    def _a_device_for_each_rank(self) -> "VllmGeneratorConfig":
        needed = self.tensor * self.replicas
        if self.gpus and len(self.gpus) != needed:
            raise ValueError(
                f"devices = {self.devices!r} names {len(self.gpus)} GPUs, but replicas = {self.replicas} with tensor = "
                f"{self.tensor} need {needed}: one for each rank"
            )
        return self

    def problems(self, cluster: "ClusterConfig", devices: "DevicesConfig") -> Iterator[str]:
        yield from super().problems(cluster, devices)
        if self.speculative is not None and not self.gpus and not self.on_cluster:
            yield _GUESSES

    def check_available(self) -> None:
        self._frozen()

    def _frozen(self) -> tuple[FrozenAdapter, ...]:
        """Read the adapters. Raises ``ConfigError`` for one that vLLM can't apply to any model."""
        adapters = read_adapters(self.adapters)
        for adapter in adapters:
            if adapter.rank > LORA_RANKS[-1]:
                raise ConfigError(f"{adapter} has rank {adapter.rank}; vLLM supports up to {LORA_RANKS[-1]}")
        return adapters

    def cannot_run(self, model: "PretrainedConfig") -> str | None:
        """Return a property of the model that can't be divided evenly among the ranks of an engine, or None."""
        text, ranks = model.get_text_config(), self.tensor
        heads = text.num_attention_heads
        sizes = {f"{heads} heads": heads}
        for shared in {layer.keys for layer in heads_of(text)}:
            if ranks % shared:  # with fewer key-value heads than ranks, several ranks have the same one
                sizes[f"{shared} key-value heads"] = shared
        for name in ("intermediate_size", "moe_intermediate_size"):
            size = getattr(text, name, None)
            if isinstance(size, int):
                sizes[f"{name} {size}"] = size
        padded = -(-text.vocab_size // _VOCABULARY) * _VOCABULARY
        sizes[f"vocabulary, which vLLM pads to {padded} rows"] = padded
        uneven = next((name for name, size in sizes.items() if size % ranks), None)
        return uneven and f"generator.tensor = {ranks} does not divide the model's {uneven}; choose another"

    def cannot_sample(self, distribution: Distribution) -> str | None:
        if self.speculative is not None and distribution.min_p:
            return "vLLM can't guess tokens ahead (generator.speculative) with sampling.min_p; leave one of them out"
        return None

    def cannot_adapt(self, rank: int) -> str | None:
        if self.sleep_level == 2:
            return "generator.sleep_level = 2 drops the frozen weights, which are sent only once"
        return f"vLLM supports LoRA ranks up to {LORA_RANKS[-1]}" if rank > LORA_RANKS[-1] else None

    def memory(self, weights: int) -> dict[str, int]:
        weights //= 2 if self.quantization else 1
        whole = bool(self.gpus) or self.on_cluster  # on a GPU the cache takes the remaining memory
        gib = self.cache_gib or (0.0 if whole else CPU_CACHE_GIB)
        return super().memory(weights) | {"KV cache": int(gib * 2**30) // self.tensor}

    def build_replica(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> "VllmGenerator":
        """Return an engine that starts when it is first needed. Raises ``ConfigError`` if vLLM is not installed, if its
        ranks can't share the model, or if there are GPUs and ``devices`` is not set."""
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtraError(
                "generator.type=vllm needs 'vllm', which is not installed: pip install 'whet[vllm]' on a machine "
                "with GPUs, make install-vllm elsewhere (docs/vllm.md); or sample with generator=torch"
            )
        if (problem := self.cannot_run(model)) is not None:
            raise ConfigError(problem)
        if deployment.images is not None:
            check_images(model)
        if self.adapters and deployment.adapter is not None:
            linear = linear_layers(model)
            for adapter in self._frozen():
                adapter.check_fits(linear)
        import torch

        if not deployment.gpus and torch.cuda.is_available():
            raise ConfigError(
                "generator.devices is not set: the vLLM engine would use the GPU that the learner computes on. Name "
                "the engine's GPUs, one for each of its ranks: generator.devices='\"1\"' is the second GPU. With "
                "devices.placement=colocated name the learner's: generator.devices='\"0\"'"
            )
        if self.speculative is not None and not deployment.gpus:
            raise ConfigError(_GUESSES)
        from whet.engines.vllm.generator import VllmGenerator

        return VllmGenerator(self if deployment.gpus else self._on_cpus(model), model, tokenizer, deployment)

    def _on_cpus(self, model: "PretrainedConfig") -> "VllmGeneratorConfig":
        """Return the settings with which vLLM computes a model on CPUs. Raises ``ConfigError`` if it can't."""
        if "linear_attention" not in (getattr(model.get_text_config(), "layer_types", None) or ()):
            return self
        if self.dtype != "bfloat16":
            raise ConfigError(
                f"on CPUs vLLM computes the linear attention of {model.model_type} in bfloat16 only; set "
                "generator.dtype=bfloat16, or generator=torch"
            )
        # A cache of states asks for prompts in parts, after which CPUs can't continue a seeded sample.
        return self.model_copy(update={"prefix_caching": False})
