"""Publishing to an engine in other processes, over a stand-in for one: the built-in generator behind the receiver. The
bytes go through real shared memory and files. What a real engine does is in ``test_vllm.py``."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cluster.test_lease import Sleeper
from tests.toy import toy_recipe
from tests.weights.collected import Listed, weights_of
from tests.weights.test_in_process import learn_something
from whet.base.errors import ConfigError, DeadlineError, GeneratorError, RefitError
from whet.cluster.lease import Devices
from whet.cluster.rendezvous import LOOPBACK, Reservation
from whet.core.types import Distribution
from whet.engines.base import Completion, SamplingParams
from whet.engines.router import Router
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.loading import named_weights
from whet.run.build import build_generator, build_learner, build_renderer
from whet.weights.buffers import BufferWriter
from whet.weights.collective import BroadcastWriter, join
from whet.weights.config import TransportName, WeightSyncConfig
from whet.weights.disk import DiskWriter
from whet.weights.engine import EngineSync
from whet.weights.manifest import from_text, pack, to_text
from whet.weights.receiver import Receiver
from whet.weights.sender import LocalSource, Sender
from whet.weights.shared_memory import machine
from whet.weights.source import WeightRequest

TRANSPORTS = ["shared_memory", "disk", "collective", "cuda_ipc"]  # the last one in the memory of CPUs
WRITERS = dict(zip(TRANSPORTS, [BufferWriter, DiskWriter, BroadcastWriter, BufferWriter], strict=True))


class StandIn:
    """An engine: the torch generator, which takes its weights from a receiver."""

    weights_complete = under_adapter = False
    ranks = 1
    rank = 0
    device = torch.device("cpu")
    rounding = 0.0

    def __init__(self, inside: TorchGenerator) -> None:
        self.inside, self.receiver = inside, Receiver(self)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.came: dict[str, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self.inside.dtype

    async def call(self, target: str, method: str, *args: Any) -> list[Any]:
        assert target == "whet.weights.receiver:Receiver"
        self.calls.append((method, args))
        return [await asyncio.to_thread(getattr(self.receiver, method), *args)]

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        return await self.inside.sample(prompt, params, session)

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["StandIn"]]:
        await self.inside.pause()
        self.weights_complete = False
        yield [self]
        self.weights_complete, self.under_adapter = True, adapter
        await self.inside.resume(version)

    # The model

    def begin(self) -> None:
        self.came = {}

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.came |= {name: tensor.clone() for name, tensor in named}

    def finish(self) -> list[str]:
        missing = [name for name, _ in named_weights(self.inside.engine.model) if name not in self.came]
        if not missing:
            self.replace(self.came)
        return missing

    def replace(self, weights: dict[str, Tensor]) -> None:
        opened = self.inside.engine.open()
        opened.load(weights.items())
        opened.check_complete()

    def shard(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor

    def read_back(self, name: str, columns: list[int]) -> Tensor | None:
        held = dict(named_weights(self.inside.engine.model)).get(name)
        return held[:, columns] if held is not None and columns else held


class Dead(StandIn):
    """An engine that takes weights and then dies: before it samples the probe."""

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        raise GeneratorError("the engine died")


class Closed(StandIn):
    """An engine that a router closes, because another request found it dead, while it samples the probe."""

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        return Completion([], [], (0, 0), "aborted")


class Silent(StandIn):
    """An engine that leaves out the token that ends a reply."""

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        return Completion([], [], (1, 1), "stop")


class Pair(StandIn):
    """Two engines behind a router, which leaves the dead one out when it is asked for the second time."""

    asked, leaves_out, other = 0, True, Dead

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list[StandIn]]:
        self.asked += 1
        dead = [self.other(self.inside)] if self.asked == 1 or not self.leaves_out else []
        async with super().refit(version, adapter):
            yield [self, *dead]


class Rank:
    """A process's model: it holds what comes."""

    device = torch.device("cpu")
    rounding = 0.0

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held: dict[str, Tensor] = {}

    def begin(self) -> None:
        self.held = {}

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.held |= {name: tensor.clone() for name, tensor in named}

    def finish(self) -> list[str]:
        return []

    def shard(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor

    def read_back(self, name: str, columns: list[int]) -> Tensor | None:
        return self.held[name][:, columns] if columns else self.held[name]


class TwoRanks:
    """An engine whose model lies in two processes, each with a receiver. It samples nothing."""

    weights_complete = False
    ranks = 2
    dtype = torch.float32

    def __init__(self) -> None:
        self.models = [Rank(0), Rank(1)]
        self.receivers = [Receiver(model) for model in self.models]

    async def call(self, target: str, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(getattr(one, method), *args) for one in self.receivers))

    async def pause(self) -> None: ...

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["TwoRanks"]]:
        self.weights_complete = False
        yield [self]
        self.weights_complete = True


def two_engines(tmp_path: Path, transport: str, deadline: float = 60.0) -> tuple[Any, EngineSync, Listed]:
    """Behind a router; and weights in several buckets."""
    config = WeightSyncConfig(transport=transport, deadline=deadline, bucket_mb=1e-3, probe=False, folder=tmp_path)
    weights = Listed([(str(number), torch.randn(8, 16)) for number in range(8)])
    return Router([TwoRanks(), TwoRanks()]), EngineSync(config, []), weights  # type: ignore[list-item]


@asynccontextmanager
async def parts(
    folder: Path, tmp_path: Path, weights: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[tuple[Any, StandIn, EngineSync]]:
    """Buckets of 64 KiB: the tiny model takes many."""
    settings = {"bucket_mb": 1 / 16, "folder": tmp_path, "deadline": 60.0} | (weights or {})
    recipe = toy_recipe(folder, **changes)
    renderer = build_renderer(recipe)
    inside, learner = build_generator(recipe, renderer), await build_learner(recipe, tmp_path, recipe.cluster.build())
    try:
        text = renderer.render_prompt([{"role": "user", "content": "what came over the wire?"}])
        yield learner, StandIn(inside), EngineSync(WeightSyncConfig(**settings), text, Distribution(temperature=0.7))
    finally:
        await inside.close()
        await learner.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_learner_learned_arrives(tiny_model: Path, tmp_path: Path, transport: str, dtype: str) -> None:
    async def go() -> None:
        changes: dict[str, Any] = {"model": {"lora": {"rank": 4}}, "optimizer": {"lr": 0.1}}
        settings = {"transport": transport}
        async with parts(tiny_model, tmp_path, settings, generator={"dtype": dtype}, **changes) as (
            learner,
            engine,
            sync,
        ):
            await sync.publish(learner, engine, 0)
            await learn_something(learner)
            metrics = (await sync.publish(learner, engine, 1)).result()
            assert engine.inside.version == 1
            assert engine.weights_complete
            assert metrics["refit/probe_mean"] < (1e-4 if dtype == "float32" else 0.25)
            assert metrics["refit/unread"] == 0
            assert metrics["refit/seconds"] > 0
            held = dict(named_weights(engine.inside.engine.model))
            for name, tensor in await weights_of(learner):
                assert name not in held or torch.equal(held[name], tensor.to(held[name].dtype))
        assert not list(tmp_path.glob("whet-weights-*"))

    asyncio.run(go())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_how_weights_are_packed_and_come_is_said_once(tiny_model: Path, tmp_path: Path, transport: str) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path, {"transport": transport}) as (learner, engine, sync):
            layouts, setups = [], []
            for version in range(3):
                engine.calls.clear()
                await sync.publish(learner, engine, version)
                layouts.append([args[2] is not None for method, args in engine.calls if method == "begin"])
                setups.append([method for method, _ in engine.calls if method == "connect"])
                assert sum(method == "take" for method, _ in engine.calls) > 4
            assert layouts == [[True], [False], [False]]
            assert setups == [["connect"], *[["connect"] if transport == "disk" else []] * 2]  # a separate folder

    asyncio.run(go())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_syncs_take_turns_with_one_learner(tiny_model: Path, tmp_path: Path, transport: str) -> None:
    """A learner is connected to the engines of one sync at a time; the other sync's are connected again."""

    async def go() -> None:
        async with parts(tiny_model, tmp_path, {"transport": transport}) as (learner, engine, sync):
            turns = [(engine, sync), (StandIn(engine.inside), EngineSync(sync.config, sync.text, sync.distribution))]
            for version, (here, by) in enumerate([*turns, *turns, turns[1]]):
                await by.publish(learner, here, version)
                assert here.weights_complete
            reconnects = [sum(method == "connect" for method, _ in each.calls) for each, _ in turns]
            assert reconnects == ([2, 3] if transport == "disk" else [2, 2])
        assert not list(tmp_path.glob("whet-weights-*"))

    asyncio.run(go())


def test_weights_that_are_packed_otherwise_are_described_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            await sync.publish(learner, engine, 0)
            sync.config = sync.config.model_copy(update={"bucket_mb": 1.0})  # and larger than the memory that is there
            engine.calls.clear()
            await sync.publish(learner, engine, 1)
            assert [method for method, _ in engine.calls[:2]] == ["begin", "connect"]
            assert engine.calls[0][1][2] is not None

    asyncio.run(go())


def test_a_publication_moves_shared_devices_once(tiny_model: Path, tmp_path: Path) -> None:
    """The learner scores the probe's few tokens without the memory that it has released."""

    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            events: list[str] = []
            tenants = {name: Sleeper(name, events) for name in ("generation", "learning")}
            sync.devices = Devices(tenants, shared=True)
            sync.devices.awake = "learning"
            metrics = (await sync.publish(learner, engine, 0)).result()
            assert "refit/probe_mean" in metrics
            assert events == ["learning sleeps", "generation wakes for new weights"]

    asyncio.run(go())


def test_weights_of_this_process_go_the_same_way(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            named = await weights_of(learner)
            await sync.load(Listed(named[::-1]), engine, 1)  # other tensors in each bucket
            assert engine.weights_complete
            await sync.publish(learner, engine, 2)

    asyncio.run(go())


def test_where_the_learner_shares_no_memory_with_this_machine_buckets_are_broadcast(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.weights.sender.machine", lambda: "another node")

    async def go() -> None:
        async with parts(tiny_model, tmp_path, {"transport": None}) as (learner, engine, sync):
            for version in range(3):
                await sync.publish(learner, engine, version)
                await learn_something(learner)
            assert [args[0] for method, args in engine.calls if method == "connect"] == ["collective"]
            layouts = [args[2] is not None for method, args in engine.calls if method == "begin"]
            assert layouts == [True, False, False]

    asyncio.run(go())


def test_memory_that_was_asked_for_and_cannot_be_shared_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.weights.sender.machine", lambda: "another node")

    async def go() -> None:
        async with parts(tiny_model, tmp_path, {"transport": "shared_memory"}) as (learner, engine, sync):
            with pytest.raises(ConfigError, match=r"memory .* than an engine; set weights\.transport=collective"):
                await sync.publish(learner, engine, 1)
            assert not engine.weights_complete

    asyncio.run(go())


def test_devices_are_found_by_their_ids_on_whichever_machine_the_first_rank_is(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.weights.sender.machine", lambda: "another node")

    async def go() -> None:
        async with parts(tiny_model, tmp_path, {"transport": "cuda_ipc"}) as (learner, engine, sync):
            await sync.publish(learner, engine, 1)
            assert engine.weights_complete
            assert sync._transport == "cuda_ipc"

    asyncio.run(go())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_come_to_every_rank_of_every_engine(tmp_path: Path, transport: str) -> None:
    """In a collective each of the four processes has its own rank. A bound of Gemma 4's towers has no dimension."""
    router, sync, weights = two_engines(tmp_path, transport)
    weights.named.append(("bound", torch.tensor(float("inf"))))
    asyncio.run(sync.load(weights, router, 1))
    for engine in router.replicas:
        assert engine.weights_complete
        for model in engine.models:
            assert list(model.held) == [name for name, _ in weights.named]
            assert all(torch.equal(model.held[name], tensor) for name, tensor in weights.named)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_in_the_place_of_a_lost_one_gets_all_weights_beside_one_that_knows_them(
    tmp_path: Path, transport: str
) -> None:
    router, sync, weights = two_engines(tmp_path, transport)

    async def go() -> None:
        source = LocalSource(weights)
        await sync._refit(source, router, 1)
        router.replicas[0] = TwoRanks()
        await sync._refit(source, router, 2)
        source.close()

    asyncio.run(go())
    for model in [model for engine in router.replicas for model in engine.models]:
        assert all(torch.equal(model.held[name], tensor) for name, tensor in weights.named)


class Dying(TwoRanks):
    """An engine that dies in the middle of a refit."""

    dead = False

    async def call(self, target: str, method: str, *args: Any) -> list[Any]:
        self.dead = self.dead or method == "take"
        await self.pause()
        return await super().call(target, method, *args)

    async def pause(self) -> None:
        if self.dead:
            raise GeneratorError("the engine died")


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("collective", marks=pytest.mark.slow)])
def test_an_engine_that_dies_in_a_refit_is_left_out_and_the_others_get_all_weights(
    tmp_path: Path, transport: str
) -> None:
    router, sync, weights = two_engines(tmp_path, transport, deadline=10.0)  # which a collective waits for the dead
    router.replicas[0] = Dying()
    asyncio.run(sync.load(weights, router, 1))
    assert router.serving == {1}
    for model in router.replicas[1].models:
        assert all(torch.equal(model.held[name], tensor) for name, tensor in weights.named)


@pytest.mark.parametrize(
    ("transport", "device", "megabytes"),
    [("shared_memory", "cuda", 64), ("collective", "cpu", 64), ("collective", "cuda", 512), ("cuda_ipc", "cuda", 512)],
)
def test_buckets_are_larger_from_gpu_to_gpu(
    monkeypatch: pytest.MonkeyPatch, transport: TransportName, device: str, megabytes: int
) -> None:
    described = [(str(i), torch.float32, torch.Size([2**20])) for i in range(200)]
    weights: Any = SimpleNamespace(described=lambda: described, tensors=list)
    writer = SimpleNamespace(open=lambda manifest: None)
    monkeypatch.setattr("whet.weights.sender.open_writer", lambda *_: writer)
    for wanted, size in ((WeightSyncConfig().bucket_bytes, megabytes), (WeightSyncConfig(bucket_mb=8).bucket_bytes, 8)):
        sender = Sender(lambda _: weights, device=torch.device(device))
        manifest = sender.begin(WeightRequest(torch.float32, wanted, transport=transport)).manifest
        assert manifest is not None
        assert sum(entry.size for entry in manifest[0]) == size * 2**20


def test_buckets_keep_order_and_size_and_a_large_tensor_comes_alone() -> None:
    sizes = [4, 4, 4, 40, 4, 8]
    described = [(str(i), torch.uint8, torch.Size([size])) for i, size in enumerate(sizes)]
    manifest = pack(described, torch.uint8, 12)
    assert [[entry.name for entry in bucket] for bucket in manifest] == [["0", "1", "2"], ["3"], ["4", "5"]]
    assert [[entry.offset for entry in bucket] for bucket in manifest] == [[0, 64, 128], [0], [0, 64]]
    assert pack([], torch.uint8, 12) == ()
    assert from_text(to_text(manifest)) == manifest


Write = Callable[..., None]


def transposed(write: Write, here: Any, bucket: int, named: list[tuple[str, Tensor]]) -> None:
    return write(
        here, bucket, [(n, t.T.reshape(t.shape) if n.endswith("1.mlp.up_proj.weight") else t) for n, t in named]
    )


def stale(write: Write, here: Any, bucket: int, named: list[tuple[str, Tensor]]) -> None:
    return write(here, bucket, [(n, t + 0.01 if n.endswith("1.mlp.up_proj.weight") else t) for n, t in named])


def swapped(write: Write, here: Any, bucket: int, named: list[tuple[str, Tensor]]) -> None:
    there = dict(named)
    one, other = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    if one in there and other in there:
        there[one], there[other] = there[other], there[one]
    return write(here, bucket, list(there.items()))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("damage", [transposed, stale, swapped])
def test_damage_on_the_way_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[..., Any], transport: str
) -> None:
    async def go() -> None:
        settings = {"transport": transport, "bucket_mb": 1.0}
        async with parts(tiny_model, tmp_path, settings) as (learner, engine, sync):
            kind = WRITERS[transport]
            honest = kind.write
            monkeypatch.setattr(kind, "write", lambda *args: damage(honest, *args))
            with pytest.raises(RefitError, match=r"did not receive.*model\.layers\.1\.mlp\.(up|gate)_proj"):
                await sync.publish(learner, engine, 1)
            assert not engine.weights_complete

    asyncio.run(go())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bucket_that_is_lost_is_named_and_a_complete_set_makes_it_good(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    async def go() -> None:
        settings = {"transport": transport, "deadline": 10.0}  # which a collective waits for who takes the lost bucket
        async with parts(tiny_model, tmp_path, settings) as (learner, engine, sync):
            described = [(name, tensor.dtype, tensor.shape) for name, tensor in await weights_of(learner)]
            lost = pack(described, torch.float32, 2**16)[2][0].name
            honest, taken = engine.call, []

            async def forgetful(target: str, method: str, *args: Any) -> list[Any]:
                taken.append(method == "take")
                if taken[-1] and sum(taken) == 3:
                    return [None]
                return await honest(target, method, *args)

            monkeypatch.setattr(engine, "call", forgetful)
            with pytest.raises(RefitError, match=r"missing or differ|were not loaded") as error:
                await sync.publish(learner, engine, 1)
            assert lost in str(error.value)
            assert not engine.weights_complete
            monkeypatch.undo()
            await sync.publish(learner, engine, 2)

    asyncio.run(go())


def test_an_engine_that_never_comes_to_a_collective_is_an_error_at_the_deadline(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        settings = {"transport": "collective", "deadline": 1.0}
        async with parts(tiny_model, tmp_path, settings) as (learner, engine, sync):
            monkeypatch.setattr(engine.receiver, "connect", lambda *_: None)
            with pytest.raises(DeadlineError, match=r"did not connect to the learner .* within 1 s"):
                await sync.publish(learner, engine, 1)

    asyncio.run(go())


@pytest.mark.parametrize("leaves_out", [True, False])
@pytest.mark.parametrize(("other", "error"), [(Dead, "the engine died"), (Closed, "closed while it sampled the probe")])
def test_an_engine_that_dies_before_it_samples_the_probe_is_left_out(
    tiny_model: Path, tmp_path: Path, leaves_out: bool, other: type[StandIn], error: str
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            pair = Pair(engine.inside)
            pair.leaves_out, pair.other = leaves_out, other
            if leaves_out:
                metrics = (await sync.publish(learner, pair, 1)).result()
                assert metrics["refit/probe_mean"] < 1e-4
                assert pair.weights_complete
            else:
                with pytest.raises(GeneratorError, match=f"replica 2 of 2: .*{error}"):
                    await sync.publish(learner, pair, 1)
            assert pair.asked == 2

    asyncio.run(go())


def test_an_engine_that_dies_is_named_although_the_learner_noticed_it_first(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            honest, handed_out = learner.next_weights, []

            async def dying(target: str, method: str, *args: Any) -> list[Any]:
                if method != "take":
                    return [machine() if method == "machine" else []]
                await asyncio.sleep(0.2)
                raise GeneratorError("the engine died")

            async def broken() -> Any:
                handed_out.append(len(handed_out))
                if len(handed_out) == 2:
                    raise DeadlineError("a broadcast did not end")
                return await honest()

            monkeypatch.setattr(engine, "call", dying)
            monkeypatch.setattr(learner, "next_weights", broken)
            with pytest.raises(GeneratorError, match="the engine died") as error:
                await sync.publish(learner, engine, 1)
            assert isinstance(error.value.__cause__, DeadlineError)

    asyncio.run(go())


def test_a_learner_that_is_not_where_it_should_be_is_an_error_at_the_deadline() -> None:
    reserved = Reservation(LOOPBACK)
    with pytest.raises(DeadlineError, match=f"not connect at {reserved.address} within 1 s"):
        join(torch.device("cpu"), 1, LOOPBACK, int(reserved.address.rpartition(":")[2]), 2, "gloo", 1.0)


def test_a_bucket_that_is_read_while_the_next_one_is_written_shows(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot instead of two, the engine would read what was written over."""

    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            monkeypatch.setattr("whet.weights.buffers.BUFFERS", 1)
            honest, honest_write, written = engine.call, BufferWriter.write, list[int]()

            def write(writer: BufferWriter, bucket: int, named: Iterable[tuple[str, Tensor]]) -> int:
                size = honest_write(writer, bucket, named)
                written.append(bucket)
                return size

            async def slow(target: str, method: str, *args: Any) -> list[Any]:
                while method == "take" and written == [0]:
                    await asyncio.sleep(0.01)
                return await honest(target, method, *args)

            monkeypatch.setattr(BufferWriter, "write", write)
            monkeypatch.setattr(engine, "call", slow)
            with pytest.raises(RefitError, match="did not receive"):
                await sync.publish(learner, engine, 1)

    asyncio.run(go())


def test_a_layer_that_computes_with_old_weights_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            await sync.publish(learner, engine, 0)
            name = "model.layers.0.self_attn.o_proj.weight"
            old = dict(named_weights(engine.inside.engine.model))[name].clone()
            await learn_something(learner)
            honest = engine.read_back
            monkeypatch.setattr(engine, "read_back", lambda n, c: old[:, c] if n == name else honest(n, c))
            with pytest.raises(RefitError, match=r"compute with different weights.*: 1 of .*0\.self_attn\.o_proj"):
                await sync.publish(learner, engine, 1)

    asyncio.run(go())


def test_a_parameter_for_which_nothing_came_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            named = [(name, tensor) for name, tensor in await weights_of(learner) if "norm" not in name]
            with pytest.raises(RefitError, match=r"have no new weight.*norm"):
                await sync.load(Listed(named), engine, 1)

    asyncio.run(go())


def test_a_prefix_cache_that_was_kept_is_noticed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            await sync.publish(learner, engine, 0)
            decoder = engine.inside._decoder
            monkeypatch.setattr(decoder, "forget_prefixes", lambda: None)
            with pytest.raises(RefitError, match="prefix cache was not reset"):
                await sync.publish(learner, engine, 1)

    asyncio.run(go())


def test_the_probe_notices_a_version_that_the_engine_never_got(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            honest = engine.sample

            async def later(*request: Any) -> Completion:
                return replace(await honest(*request), versions=(1, 7))

            monkeypatch.setattr(engine, "sample", later)
            with pytest.raises(RefitError, match=r"after version 1 was published, the engine .* says that version 7"):
                await sync.publish(learner, engine, 1)

    asyncio.run(go())


def test_an_engine_that_samples_no_token_of_the_probe_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            engine.sample = Silent(engine.inside).sample  # type: ignore[method-assign]
            with pytest.raises(RefitError, match=r"sampled no token of the probe.* the token that ends a reply, too"):
                await sync.publish(learner, engine, 1)

    asyncio.run(go())


@pytest.mark.parametrize("fault", ["another temperature", "an untied head"])
def test_the_probe_notices_what_the_weights_cannot_show(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            await sync.publish(learner, engine, 0)
            if fault == "another temperature":
                honest = engine.sample
                plain = Distribution()
                monkeypatch.setattr(
                    engine, "sample", lambda p, params, s: honest(p, replace(params, distribution=plain), s)
                )
            else:
                head = engine.inside.engine.model.get_output_embeddings()
                head.register_forward_hook(lambda module, args, out: out + 0.5 * torch.randn_like(out))
            with pytest.raises(RefitError, match="decode path"):
                await sync.publish(learner, engine, 1)

    asyncio.run(go())


def test_the_proofs_can_be_turned_off(tiny_model: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with parts(tiny_model, tmp_path) as (learner, engine, sync):
            sync.config = WeightSyncConfig(digest=False, probe=False)
            metrics = (await sync.publish(learner, engine, 1)).result()
            assert set(metrics) == {"refit/seconds", "refit/gigabytes", "refit/unread"}

    asyncio.run(go())
