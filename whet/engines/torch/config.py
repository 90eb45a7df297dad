"""The settings of the in-process generator, in a separate module so that a recipe is read without torch."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from whet.base.lazy import torch_dtype
from whet.config import Component
from whet.engines.config import Deployment, GeneratorConfig, NGram

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from whet.engines.torch.generator import TorchGenerator


def usual_prefix_tokens(bytes_per_token: int) -> int:
    """Return the size of the prefix cache in tokens, if the settings leave it out."""
    return max(8192, 2**30 // max(1, bytes_per_token))


SPECULATIVE = {"ngram": "whet.engines.config:NGram"}
"""The kinds of guesses by their names in recipes."""


class TorchGeneratorConfig(GeneratorConfig):
    """Settings of the in-process generator."""

    in_process: ClassVar[bool] = True
    records_experts: ClassVar[bool] = True
    pauses: ClassVar[bool] = True

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """The dtype of its computations. ``auto``: as ``learner.precision`` chooses."""
    prefill_tokens: int = Field(default=4096, ge=1)
    """Maximum number of prompt tokens in one forward pass (a longer prompt runs alone)."""
    prefix_tokens: int | None = Field(default=None, ge=0)
    """Size of the prefix cache in tokens; models with recurrent layers don't use it. None: what fits in 1 GiB, and at
    least 8192. Episodes of several turns are slow if it can't hold all that are in flight."""
    speculative: Annotated[NGram, Component(SPECULATIVE)] | None = None
    """Guess several tokens and verify them at once, in rows that a forward pass computes anyway: ``ngram``. Changes no
    token and no log-prob, and is faster if few requests are in flight and answers repeat themselves or their prompt."""
    threads: int | None = Field(default=None, ge=1, le=10_000)
    """Threads of this process's compute thread, which is shared with learners of ``cluster=local``; None: torch's
    default."""
    packed_weights: bool = True
    """On a CPU, keep a second copy of weights in the order of the product kernels, which is faster with few
    rows."""
    return_memory: bool | None = None
    """On a CPU, whether memory that is freed before the learner computes is returned to the system: it bounds the
    peak, and a step takes up to a fifth longer. None: if less than a quarter of the memory is available."""

    @property
    def refuses_likeliest(self) -> None:
        return None

    @property
    def refuses_images(self) -> None:
        return None

    def cannot_run(self, model: "PretrainedConfig") -> str | None:
        from whet.engines.torch.engine_model import cannot_sample, unsupported_layers

        if self.speculative is not None and (why := unsupported_layers(model)) is not None:
            return (
                f"generator.speculative can't be used with {model.model_type}: {why}, so it is sampled with "
                "transformers' cache, from which wrong guesses can't be taken back; leave generator.speculative out"
            )
        return cannot_sample(model)

    def build_replica(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> "TorchGenerator":
        from whet.processes.compute import compute_now

        return compute_now(self._build, model, tokenizer, deployment)

    def _build(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> "TorchGenerator":
        from whet.engines.torch.generator import TorchGenerator
        from whet.engines.torch.loading import build_engine_model
        from whet.models.device import choose_device

        images = deployment.images
        engine = build_engine_model(
            model, None, torch_dtype(self.dtype), str(choose_device()), vision=images is not None
        )
        return TorchGenerator(self, engine, tokenizer, deployment.cores, deployment.record_experts, images)
