"""An engine that clusters can host and that needs no vLLM: the built-in generator, which takes its weights as one in
other processes does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from tests.weights.test_engine import StandIn
from whet.engines.config import Deployment
from whet.engines.torch.config import TorchGeneratorConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class HostableConfig(TorchGeneratorConfig):
    """Recipes name it by its dotted path."""

    in_process: ClassVar[bool] = False

    def build_replica(
        self, model: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None", deployment: Deployment
    ) -> Any:
        return Hostable(super().build_replica(model, tokenizer, deployment))


class Hostable(StandIn):
    """The rest of ``PausableEngine``, which the tests of transports don't need."""

    def __init__(self, inside: Any) -> None:
        super().__init__(inside)
        self.pause, self.resume, self.close, self.tally = inside.pause, inside.resume, inside.close, inside.tally
        self.sleep, self.wake = inside.sleep, inside.wake

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list[StandIn]]:
        async with super().refit(version, adapter):
            yield [self]
