"""LoRA's tensors alone to an engine, over a stand-in for one: the built-in generator behind the receiver, which lays
the adapter that came over the weights that came. What a real engine does is in ``test_vllm_adapter.py``."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toy import toy_recipe
from tests.weights.collected import Listed, weights_of
from tests.weights.test_engine import TRANSPORTS, StandIn, Write
from tests.weights.test_in_process import learn_something
from whet.base.errors import ConfigError, RefitError
from whet.core.types import Distribution
from whet.engines.torch.loading import named_weights
from whet.run.build import build_generator, build_learner, build_renderer
from whet.weights.buffers import BufferWriter
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

NAME = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"


class WithAdapters(StandIn):
    """An engine that computes with W + scaling B A and says that it holds B A as it came."""

    louder = 1.0  # how many times too strong it applies what it holds

    def adapter(self, rank: int, alpha: float) -> "Adapter":
        return Adapter(self, self.louder * alpha / rank)


class Adapter:
    def __init__(self, engine: WithAdapters, scaling: float) -> None:
        self.engine, self.scaling = engine, scaling
        self.expected: list[str] = []
        self.came: dict[str, Tensor] = {}

    def refuses(self, names: list[str]) -> list[str]:
        self.expected = names
        return []

    def begin(self) -> None: ...

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.came |= {name: tensor.clone() for name, tensor in named}

    def finish(self) -> list[str]:
        missing = [name for name in self.expected if name not in self.came]
        if not missing:
            self.engine.replace(dict(self.merged()))
        return missing

    def merged(self) -> list[tuple[str, Tensor]]:
        whole = dict(self.engine.came)
        for name, a in self.came.items():
            if "lora_A" in name:
                layer = name.removeprefix("base_model.model.").replace(".lora_A", "")
                whole[layer] = whole[layer] + self.scaling * self.came[name.replace("lora_A", "lora_B")] @ a
        return list(whole.items())

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def read_back(self, name: str, columns: list[int]) -> Tensor:
        assert columns == []
        return self.came[name]


@asynccontextmanager
async def parts(
    folder: Path, tmp_path: Path, lora: bool = True, **weights: Any
) -> AsyncIterator[tuple[Any, WithAdapters, EngineSync]]:
    settings = {"bucket_mb": 1 / 128, "folder": tmp_path, "deadline": 60.0, "lora": "adapter"} | weights
    model = {"lora": {"rank": 4, "alpha": 12.0}} if lora else {}
    recipe = toy_recipe(folder, model=model, optimizer={"lr": 0.1})
    renderer = build_renderer(recipe)
    inside, learner = build_generator(recipe, renderer), await build_learner(recipe, tmp_path, recipe.cluster.build())
    try:
        text = renderer.render_prompt([{"role": "user", "content": "what came over the wire?"}])
        yield (
            learner,
            WithAdapters(inside),
            EngineSync(WeightSyncConfig(**settings), text, Distribution(temperature=0.7)),
        )
    finally:
        await inside.close()
        await learner.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_the_first_time_only_the_adapter_travels(tiny_model: Path, tmp_path: Path, transport: str) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path, transport=transport) as (learner, engine, sync):
            sizes, layouts = [], []
            for version in range(4):
                engine.calls.clear()
                metrics = (await sync.publish(learner, engine, version)).result()
                sizes.append(round(metrics["refit/gigabytes"] * 1e9))
                layouts.append([args[2] is not None for method, args in engine.calls if method == "begin"])
                assert engine.weights_complete
                assert engine.under_adapter
                assert metrics["refit/probe_mean"] < 1e-4
                assert metrics["refit/unread"] == 0
                held = dict(named_weights(engine.inside.engine.model))
                for name, tensor in await weights_of(learner):
                    if name in held:
                        torch.testing.assert_close(held[name], tensor)
                await learn_something(learner)
            facts = learner.facts
            assert sizes == [4 * facts.parameters] + [4 * facts.trained_parameters] * 3
            assert layouts == [[True, True], [False], [False], [False]]
        assert not list(tmp_path.glob("whet-weights-*"))

    asyncio.run(go())


def test_buckets_that_are_broadcast_from_another_machine_carry_an_adapter_too(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.weights.sender.machine", lambda: "another node")

    async def go() -> None:
        async with parts(tiny_model, tmp_path, transport=None) as (learner, engine, sync):
            for version in range(3):
                await sync.publish(learner, engine, version)
                await learn_something(learner)
            contents = ["adapter" if args[3] else "base" for method, args in engine.calls if method == "begin"]
            assert contents == ["base", "adapter", "adapter", "adapter"]

    asyncio.run(go())


def test_where_nobody_knows_what_the_engine_holds_the_frozen_weights_come_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with (
            parts(tiny_model, tmp_path) as (learner, engine, sync),
            parts(tiny_model, tmp_path) as (other, _, _),
        ):
            first = (await sync.publish(learner, engine, 0)).result()["refit/gigabytes"]
            with monkeypatch.context() as patch:
                patch.setattr(engine.receiver, "take", lambda *_: None)
                with pytest.raises(RefitError, match=r"did not receive .* lora_A|missing or differ"):
                    await sync.publish(learner, engine, 1)
            assert not engine.weights_complete
            after_a_fault = (await sync.publish(learner, engine, 2)).result()["refit/gigabytes"]
            of_another = (await sync.publish(other, engine, 3)).result()["refit/gigabytes"]
            await sync.load(Listed(await weights_of(learner)), engine, 4)
            assert not engine.under_adapter
            after_merged = (await sync.publish(other, engine, 5)).result()["refit/gigabytes"]
            later = (await sync.publish(other, engine, 6)).result()["refit/gigabytes"]
            assert first == after_a_fault == of_another == after_merged > 4 * later

    asyncio.run(go())


def stale(write: Write, here: Any, bucket: int, named: list[tuple[str, Tensor]]) -> None:
    return write(here, bucket, [(n, t + 0.01 if n == NAME.format(1, "A") else t) for n, t in named])


def swapped(write: Write, here: Any, bucket: int, named: list[tuple[str, Tensor]]) -> None:
    there = dict(named)
    one, other = NAME.format(0, "A"), NAME.format(1, "A")
    if one in there and other in there:
        there[one], there[other] = there[other], there[one]
    return write(here, bucket, list(there.items()))


@pytest.mark.parametrize("damage", [stale, swapped])
def test_damage_on_the_way_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[..., Any]
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path, bucket_mb=1.0) as (learner, engine, sync):
            await sync.publish(learner, engine, 0)
            honest = BufferWriter.write
            monkeypatch.setattr(BufferWriter, "write", lambda *args: damage(honest, *args))
            with pytest.raises(RefitError, match=r"did not receive.*self_attn\.o_proj\.lora_A"):
                await sync.publish(learner, engine, 1)
            assert not engine.weights_complete

    asyncio.run(go())


def test_an_engine_that_holds_the_adapter_and_applies_it_too_strongly_is_noticed(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            await sync.publish(learner, engine, 0)
            await learn_something(learner)
            engine.louder = 2.0
            with pytest.raises(RefitError, match="decode path"):
                await sync.publish(learner, engine, 1)

    asyncio.run(go())


def test_modules_that_the_engine_refuses_are_named_with_what_to_do(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            refused = [f"model.layers.{number}.mlp.gate" for number in range(7)]
            monkeypatch.setattr(Adapter, "refuses", lambda self, names: refused)
            with pytest.raises(ConfigError, match=r"0\.mlp\.gate, .* and 2 more\. .*weights\.lora=merged"):
                await sync.publish(learner, engine, 0)
            assert not engine.weights_complete

    asyncio.run(go())


def test_a_learner_without_lora_has_no_adapter_to_send(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path, lora=False) as (learner, engine, sync):
            with pytest.raises(ConfigError, match=r"model\.lora is not set"):
                await sync.publish(learner, engine, 0)

    asyncio.run(go())
