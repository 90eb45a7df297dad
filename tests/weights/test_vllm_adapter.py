"""LoRA's tensors alone to a real vLLM engine: they arrive, are what its layers multiply with, and every fault shows."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.tiny import VOCAB, tiny_llama, tiny_qwen3
from tests.vllm_engine import Loop, Parts
from tests.weights.test_in_process import learn_something
from whet.base.errors import ConfigError, RefitError
from whet.engines.base import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class Adapted(Parts):
    """A learner of LoRA, whose B A counts three times, and an engine that can be made to fail."""

    def __init__(self, model: Any, scratch: Path, **generator: Any) -> None:
        lora = {"lora": {"rank": 4, "alpha": 12.0}}
        super().__init__(
            model, scratch, model=lora, generator=generator, weights={"bucket_mb": 1 / 64, "lora": "adapter"}
        )

    async def fault(self, method: str, *args: Any) -> None:
        await self.generator.call("tests.weights.test_vllm_adapter:Fault", method, *args)


@pytest.fixture(scope="module")
def parts(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    parts = Adapted(tiny_qwen3(initializer_range=0.3), tmp_path_factory.mktemp("tied"))
    yield parts
    parts.close(loop)


@pytest.mark.parametrize("transport", ["shared_memory", "disk", "collective", "cuda_ipc"])
def test_the_frozen_weights_come_once_and_then_the_adapter_alone(parts: Adapted, loop: Loop, transport: str) -> None:
    async def go() -> None:
        sync = parts.sync(transport=transport)
        sizes = []
        for _ in range(3):
            metrics = await parts.publish(sync)
            assert metrics["refit/unread"] == 0
            assert metrics["refit/probe_max"] < 1e-3
            sizes.append(metrics["refit/gigabytes"])
            await learn_something(parts.learner)
        facts = parts.learner.facts
        every = 4e-9 * (facts.parameters + VOCAB * 64)  # the tied head travels, too
        assert sizes == pytest.approx([every, *[4e-9 * facts.trained_parameters] * 2])

    loop.run(go())


def test_requests_under_way_go_on_under_the_new_adapter(parts: Adapted, loop: Loop) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        long = asyncio.ensure_future(parts.generator.sample([5, 6, 7], SamplingParams(200, seed=1), "s"))
        await parts.generator.sample([5, 6, 7], SamplingParams(2, seed=2), "t")
        await learn_something(parts.learner)
        await parts.publish(sync)
        assert (await long).versions == (parts.version - 1, parts.version)

    loop.run(go())


class Fault:
    """Runs in the engine: what happens at the next refit of the adapter, on one rank."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def _at_finish(self, rank: int, fault: Any) -> None:
        from whet.engines.vllm.adapter import VllmAdapter

        honest = VllmAdapter.finish

        def faulty(adapter: Any) -> Any:
            VllmAdapter.finish = honest
            return fault(adapter, honest)

        if self.model.rank == rank:
            VllmAdapter.finish = faulty

    def stale(self, rank: int = 0) -> None:
        """The adapter of before stays, as with vLLM's own way without load_inplace."""
        self._at_finish(rank, lambda adapter, honest: [])

    def swapped(self, rank: int = 0) -> None:
        """The A of two layers are exchanged."""
        one, other = (f"base_model.model.model.layers.{n}.self_attn.o_proj.lora_A.weight" for n in (0, 1))

        def swap(adapter: Any, honest: Any) -> Any:
            loaded = adapter._loaded
            loaded[one], loaded[other] = loaded[other], loaded[one]
            return honest(adapter)

        self._at_finish(rank, swap)

    def scaled(self, rank: int = 0) -> None:
        """B A counts once instead of three times."""

        def scale(adapter: Any, honest: Any) -> Any:
            adapter._alpha = 4.0
            missing = honest(adapter)
            adapter._alpha = 12.0
            return missing

        self._at_finish(rank, scale)

    def dropped(self, rank: int = 0) -> None:
        """One layer of a fused one goes without its adapter."""

        def drop(adapter: Any, honest: Any) -> Any:
            for kind in ("lora_A", "lora_B"):
                del adapter._loaded[f"base_model.model.model.layers.1.mlp.gate_proj.{kind}.weight"]
            adapter._expected = list(adapter._loaded)
            return honest(adapter)

        self._at_finish(rank, drop)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("stale", r"layers\.0\.self_attn\.q_proj\.lora_A"),
        ("swapped", r": 2 of .*layers\.0\.self_attn\.o_proj\.lora_A\.weight, .*layers\.1\.self_attn\.o_proj\.lora_A"),
        ("scaled", r": 14 of 28 .*layers\.0\.self_attn\.q_proj\.lora_B"),
        ("dropped", r": 2 of .*layers\.1\.mlp\.gate_proj\.lora_A\.weight, .*layers\.1\.mlp\.gate_proj\.lora_B"),
    ],
)
def test_a_layer_that_multiplies_with_something_else_is_named(
    parts: Adapted, loop: Loop, fault: str, named: str
) -> None:
    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        await learn_something(parts.learner)
        await parts.fault(fault)
        with pytest.raises(RefitError, match=f"compute with different weights.*{named}"):
            await parts.publish(sync)
        with pytest.raises(RefitError, match="no complete set of weights"):
            await parts.generator.sample([5, 6, 7], SamplingParams(2), "s")

    loop.run(go())


def test_a_bucket_that_is_lost_is_named_and_then_the_frozen_weights_come_again(
    parts: Adapted, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        sync = parts.sync()
        first = await parts.publish(sync)
        honest = parts.generator.call

        async def forgetful(target: str, method: str, *args: Any) -> list[Any]:
            return [None] if method == "take" and args[0] == 1 else await honest(target, method, *args)

        monkeypatch.setattr(parts.generator, "call", forgetful)
        with pytest.raises(RefitError, match=r"did not receive .* missing or differ, the first \S+lora_[AB]\.weight"):
            await parts.publish(sync)
        monkeypatch.undo()
        again = await parts.publish(sync)
        assert again["refit/gigabytes"] == first["refit/gigabytes"]

    loop.run(go())


def test_requests_that_are_not_answered_under_the_adapter_are_noticed(
    parts: Adapted, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers have it, but no request uses it."""

    async def go() -> None:
        sync = parts.sync()
        await parts.publish(sync)
        monkeypatch.setattr(parts.generator, "_adapter", lambda *_: None)
        with pytest.raises(RefitError, match="decode path"):
            await parts.publish(sync)

    loop.run(go())


def test_modules_that_the_engine_does_not_adapt_are_named(
    parts: Adapted, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.weights import engine

    async def go() -> None:
        sync = parts.sync()
        honest = engine.to_text
        monkeypatch.setattr(
            engine, "to_text", lambda m: honest(m).replace("layers.0.self_attn.q_proj.lora", "embed_tokens.lora")
        )
        with pytest.raises(ConfigError, match=r"can't apply LoRA to model\.embed_tokens\. .*weights\.lora=merged"):
            await parts.publish(sync)

    loop.run(go())


def test_every_rank_of_an_engine_reads_back_its_part(loop: Loop, tmp_path: Path) -> None:
    model = tiny_llama(initializer_range=0.3, attention_bias=True, mlp_bias=True)
    parts = Adapted(model, tmp_path, tensor=2, threads=2)

    async def go() -> None:
        sync = parts.sync()
        for _ in range(2):
            metrics = await parts.publish(sync)
            assert metrics["refit/unread"] == 0
            assert metrics["refit/probe_max"] < 1e-3
            await learn_something(parts.learner)
        await parts.fault("swapped", 1)
        with pytest.raises(
            RefitError, match=r"rank 1 of the engine: .* compute with different .*layers\.0\.self_attn\.o_proj"
        ):
            await parts.publish(sync)

    try:
        loop.run(go())
    finally:
        parts.close(loop)
