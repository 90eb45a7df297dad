"""The settings of the generator on vLLM. Apart from it, so that a recipe is read without torch or vLLM."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from whet.config import Config

if TYPE_CHECKING:
    from whet.generators.vllm_generator import VllmGenerator


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
    """Memory for keys and values, in GiB."""
    devices: str | None = Field(default=None, min_length=1)
    """The GPUs of the engine, as CUDA_VISIBLE_DEVICES says it ("1" or "2,3"). Has to be set where there are GPUs: the
    learner computes on the first ones."""
    threads: int | None = Field(default=None, ge=1)
    """Of the engine's products on CPUs; None: one for each core that this process may use."""
    compile: bool = False
    """Compile the model (on GPUs also capture graphs): slower to start, faster to sample."""
    deadline: float = Field(default=300.0, gt=0)
    """Seconds without progress after which a wait is an error."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds that the engine may take to start."""

    def build(self, model_config: Any, tokenizer: Any) -> "VllmGenerator":
        """A generator for models of a transformers config. Its weights are still to be published. The engine starts
        when it is first needed. Raises ``ConfigError`` where vLLM is not installed, or
        where there are GPUs and ``devices`` does not say which."""
        import importlib.util

        from whet.errors import ConfigError

        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "generator.type=vllm needs vLLM, which is not installed here. Run make install-vllm (docs/vllm.md says "
                "what that does), or sample with generator=torch"
            )
        import torch

        if self.devices is None and torch.cuda.is_available():
            raise ConfigError(
                "generator.devices is not set: the vLLM engine would take the GPU that the learner computes on. Say "
                "which ones are the engine's: generator.devices='\"1\"' is the second"
            )
        from whet.generators.vllm_generator import VllmGenerator

        return VllmGenerator(self, model_config, tokenizer)
