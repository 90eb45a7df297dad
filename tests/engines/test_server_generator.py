"""Engines on servers that are already running, against doubles of vLLM's and SGLang's (``server_double``)."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.engine_contract import PROMPT, PausableContract, run
from tests.engines.holding import until
from tests.engines.server_double import Running, doubles
from tests.tiny import tiny_llama, tiny_tokenizer
from whet.base.errors import WhetError
from whet.core.types import Distribution
from whet.engines.base import Engine, SamplingParams
from whet.engines.server.config import RemoteConfig


class ServerContract(PausableContract):
    """The contract, for a generator on one double that already has weights."""

    protocol = "vllm"
    folder: Path  # of the double's model

    @classmethod
    @contextmanager
    def held(cls, generator: object) -> Iterator[Callable[[], Awaitable[None]]]:  # type: ignore[override]
        (cls.folder / "holds").unlink(missing_ok=True)
        (cls.folder / "held").touch()
        try:
            yield lambda: until((cls.folder / "holds").exists)
        finally:
            (cls.folder / "held").unlink()

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
        cls.folder = tmp_path_factory.mktemp("model")
        tiny_llama(initializer_range=0.3).save_pretrained(cls.folder)
        tiny_tokenizer().save_pretrained(cls.folder)
        with doubles(cls.protocol, cls.folder) as (server,):
            yield server

    @pytest.fixture
    def generator(self, server: Any) -> Engine[Any]:
        config = RemoteConfig(urls=[server.url], protocol=self.protocol, dtype="float32", max_context=512)
        return config.build(tiny_llama().config, tiny_tokenizer())

    def run(self, generator: Any, body: Callable[[], Awaitable[object]]) -> object:
        async def with_weights() -> None:
            await generator.pause()
            await generator.resume(0)
            generator.weights_complete = True
            await body()

        return run(generator, with_weights)


class TestVllm(ServerContract):
    """The contract, as it is."""


class TestSglang(ServerContract):
    protocol = "sglang"

    def test_if_only_one_token_can_be_sampled_its_log_prob_is_zero(self, generator: Engine[Any]) -> None:
        """SGLang's log-probs are without filters: they are refused."""

        async def body() -> None:
            for d in (Distribution(top_k=1), Distribution(top_p=0.5), Distribution(min_p=0.5)):
                with pytest.raises(WhetError, match="before it applies top_k"):
                    await generator.sample(PROMPT, SamplingParams(12, distribution=d), "s")

        self.run(generator, body)

    def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            free = await generator.sample(PROMPT, SamplingParams(16, greedy=True), "s")
            stop = tiny_tokenizer().decode(free.tokens[6:9])
            c = await generator.sample(PROMPT, SamplingParams(16, greedy=True, stop=("\0\0", stop)), "s")
            assert c.finish_reason == "stop"
            assert c.tokens == free.tokens[: len(c.tokens)]
            assert tiny_tokenizer().decode(c.tokens).endswith(stop)

        self.run(generator, body)
