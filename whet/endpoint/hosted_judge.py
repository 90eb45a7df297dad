"""A judge's model in its process, which ``whet.tasks.judges.hosted`` starts without torch: a frozen model on the
built-in engine that answers requests of OpenAI's chat API. A reply is a function of the model and the request, to the
bit."""

from typing import Any, cast

import torch

from whet.base.lazy import torch_dtype
from whet.chat.renderer import Renderer
from whet.endpoint.judge_model import JudgeModel
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.loading import build_engine_model
from whet.models.config import ModelConfig
from whet.models.loading import load_model, load_model_config, load_tokenizer
from whet.models.precision import choose_precision

_STALL_S = 3600.0  # seconds; the owner has a deadline for each request


class HostedJudge(JudgeModel):
    """The model of a judge, as a ``Served``."""

    def __init__(
        self, model: str, revision: str | None, dtype: str, threads: int, max_context: int, max_batch: int
    ) -> None:
        """Raises ``WhetError`` for a model that can't be loaded, or has no chat template."""
        torch.set_num_threads(threads)
        config = ModelConfig(path=model, revision=revision)
        if dtype == "auto":
            dtype = choose_precision(load_model_config(config), "cpu").precision
        self.dtype = dtype
        tokenizer = load_tokenizer(config)
        renderer = Renderer(tokenizer)
        loaded = cast(Any, load_model(config, dtype=torch.float32, train=False))
        text = loaded.config.get_text_config()
        longest: int | None = getattr(text, "max_position_embeddings", None)
        most = min(max_context, longest or max_context)
        settings = TorchGeneratorConfig(
            dtype=cast(Any, dtype), max_context=most, max_batch=max_batch, threads=threads, deadline=_STALL_S,
            packed_weights=False,
        )  # fmt: skip
        engine = build_engine_model(loaded.config, loaded.state_dict(), torch_dtype(dtype))
        super().__init__(TorchGenerator(settings, engine, tokenizer), renderer, most)

    async def computes_in(self) -> str:
        """Return the dtype of the computations."""
        return self.dtype

    async def responds(self) -> None:
        """See ``Served``."""

    async def blocked_at(self) -> str | None:
        return None
