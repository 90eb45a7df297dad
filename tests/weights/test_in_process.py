"""Every way in which a generator may end up with other weights than the learner's is noticed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.groups import episode
from tests.toy import toy_recipe
from tests.weights.collected import weights_of
from whet.base.errors import ConfigError, RefitError
from whet.config import load
from whet.core.batch import Batch
from whet.core.types import Group, Span, Task
from whet.engines.torch.engine_model import OpenEngine
from whet.engines.torch.loading import named_weights
from whet.losses.composite import PolicyLoss
from whet.run.build import build_generator, build_learner, build_renderer
from whet.run.recipe import Recipe
from whet.weights.config import RefitConfig
from whet.weights.in_process import InProcessSync


@asynccontextmanager
async def parts(folder: Path, tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Any, Any, InProcessSync]]:
    recipe = toy_recipe(folder, **changes)
    renderer = build_renderer(recipe)
    generator, learner = (
        build_generator(recipe, renderer),
        await build_learner(recipe, tmp_path, recipe.cluster.build()),
    )
    try:
        text = renderer.render_prompt([{"role": "user", "content": "what came over the wire?"}])
        yield learner, generator, InProcessSync(recipe.weights, text)
    finally:
        await generator.close()
        await learner.close()


async def learn_something(learner: Any) -> None:
    spans = [Span([5, 6, 7], False), Span([8, 9, 10], True, [-1.0] * 3)]
    batch = Batch.from_groups([Group("g", Task("t", []), [episode(spans)])]).weigh("token")
    batch.advantages = batch.trained.double()
    await learner.update(batch, PolicyLoss())


def test_what_the_learner_learned_arrives(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, generator, sync):
            await sync.publish(learner, generator, 0)
            await learn_something(learner)
            metrics = (await sync.publish(learner, generator, 1)).result()
            assert generator.version == 1
            assert metrics["refit/probe_mean"] < 1e-4
            held = dict(named_weights(generator.engine.model))
            for name, tensor in await weights_of(learner):
                assert name not in held or torch.equal(held[name], tensor)

    asyncio.run(go())


def test_a_merged_adapter_arrives_in_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        changes = {"model": {"lora": {"rank": 4}}, "generator": {"dtype": "bfloat16"}, "optimizer": {"lr": 0.1}}
        async with parts(tiny_model, tmp_path, **changes) as (learner, generator, sync):
            await learn_something(learner)
            metrics = (await sync.publish(learner, generator, 1)).result()
            assert 0 < metrics["refit/probe_mean"] < 0.25

    asyncio.run(go())


def stale(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor + 0.01 if "layers.1.mlp.up" in name else tensor) for name, tensor in named]


def transposed(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    square = next(name for name, tensor in named if tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1])
    return [(name, tensor.T.contiguous() if name == square else tensor) for name, tensor in named]


def swapped(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    there = dict(named)
    there[first], there[second] = there[second], there[first]
    return list(there.items())


@pytest.mark.parametrize("damage", [stale, transposed, swapped])
def test_the_digest_names_the_tensors_that_did_not_arrive(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any], Any]
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, generator, sync):
            honest = OpenEngine.load
            monkeypatch.setattr(OpenEngine, "load", lambda model, named: honest(model, damage(named)))
            with pytest.raises(RefitError, match=r"model\.layers\.\d"):
                await sync.publish(learner, generator, 1)

    asyncio.run(go())


def test_what_is_overwritten_after_it_arrived_is_noticed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, generator, sync):
            honest = OpenEngine.check_complete
            tensor = dict(named_weights(generator.engine.model))["model.layers.0.self_attn.q_proj.weight"]

            def spoilt(model: OpenEngine) -> None:
                honest(model)
                tensor[0, 0] += 1e-3

            monkeypatch.setattr(OpenEngine, "check_complete", spoilt)
            with pytest.raises(RefitError, match=r"layers\.0\.self_attn\.q_proj"):
                await sync.publish(learner, generator, 1)

    asyncio.run(go())


def test_a_tensor_that_is_not_sent_at_all_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, generator, sync):
            honest = OpenEngine.load
            monkeypatch.setattr(OpenEngine, "load", lambda model, named: honest(model, named[:-3]))
            with pytest.raises(RefitError, match="missing"):
                await sync.publish(learner, generator, 1)

    asyncio.run(go())


@pytest.mark.parametrize("fault", ["stale weights", "untied head", "another temperature"])
def test_the_probe_notices_what_a_digest_of_the_parameters_cannot(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The digest sees parameters; the decode path may compute from something else."""

    async def go() -> None:
        async with parts(tiny_model, tmp_path, weights={"digest": False}) as (learner, generator, sync):
            await sync.publish(learner, generator, 0)
            honest = OpenEngine.score_decode
            if fault == "stale weights":
                held = [(name, tensor.clone()) for name, tensor in named_weights(generator.engine.model)]
                await learn_something(learner)
                load = OpenEngine.load
                monkeypatch.setattr(OpenEngine, "load", lambda model, named: load(model, held))
            elif fault == "untied head":
                head = generator.engine.model.get_output_embeddings()
                load = OpenEngine.load

                def untie(model: Any, named: Any) -> None:
                    load(model, named)
                    other = head.weight + 0.1 * torch.randn_like(head.weight)
                    head.forward = lambda x: torch.nn.functional.linear(x, other)

                monkeypatch.setattr(OpenEngine, "load", untie)
            else:
                monkeypatch.setattr(OpenEngine, "score_decode", lambda m, p, t: [2 * lp for lp in honest(m, p, t)])
            with pytest.raises(RefitError, match="decode path"):
                await sync.publish(learner, generator, 1)

    asyncio.run(go())


def test_weights_that_a_step_damaged_are_the_learners_fault(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        damaging = {"learner": {"precision": "float32"}, "optimizer": {"lr": 1e39}}
        async with parts(tiny_model, tmp_path, **damaging) as (learner, generator, sync):
            await learn_something(learner)
            with pytest.raises(RefitError, match="its weights have NaN or infinite numbers"):
                await sync.publish(learner, generator, 1)

    asyncio.run(go())


def test_the_proofs_can_be_turned_off(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, generator, sync):
            sync.config = RefitConfig(digest=False, probe=False)
            assert (await sync.publish(learner, generator, 1)).result() == {}

    asyncio.run(go())


@pytest.mark.parametrize(
    "settings", ["transport=disk", "transport=disk folder=/elsewhere", "transport=collective deadline=5.0", "columns=3"]
)
def test_what_only_an_engine_in_other_processes_reads_is_refused(settings: str) -> None:
    overrides = [f"weights.{setting}" for setting in settings.split()]
    key = overrides[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key} = .* needs generator = vllm"):
        load(Recipe, "quickstart", overrides)
    load(Recipe, "quickstart", [*overrides, "generator=vllm"])
