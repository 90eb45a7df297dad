"""The settings of the in-process generator. Apart from it, so that a recipe is read without torch."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from whet.config import Config

if TYPE_CHECKING:
    from whet.generators.torch_generator import TorchGenerator


class TorchGeneratorConfig(Config):
    """How the in-process generator runs."""

    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    max_batch: int = Field(default=64, ge=1)
    """Completions decoded side by side; more requests wait in a queue."""
    max_context: int = Field(default=4096, ge=2)
    """Most tokens of prompt and completion together."""
    prefill_tokens: int = Field(default=4096, ge=1)
    """Most prompt tokens in one forward (a longer prompt runs alone)."""
    prefix_tokens: int = Field(default=8192, ge=0)
    """Prompt tokens whose keys and values are kept for later requests."""
    threads: int | None = Field(default=None, ge=1)
    """Of the engine's matrix products; None leaves torch's choice."""
    fuse: bool = True
    """Compute q, k, v and gate, up as joint products."""
    deadline: float = Field(default=300.0, gt=0)
    """Seconds without progress after which a wait is an error."""

    def build(self, model_config: Any, tokenizer: Any) -> "TorchGenerator":
        """A generator for models of a transformers config. Its weights are still to be loaded."""
        import torch

        from whet.generators.engine_model import build_engine_model
        from whet.generators.torch_generator import TorchGenerator

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = build_engine_model(model_config, None, getattr(torch, self.dtype), device)
        return TorchGenerator(self, model, tokenizer)
