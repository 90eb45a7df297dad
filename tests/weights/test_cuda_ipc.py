"""Weights through memory that each rank of a learner shares with the rank of an engine on the same device. Learner and
engines are processes as in a run; each rank believes that it has a separate device, whose memory is a CPU's. CUDA
itself is not run here."""

import asyncio
import gc
import inspect
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tests.learner.parts import published
from tests.parallel.cases import Case, build
from tests.parallel.ranks import on_ranks
from tests.parallel.test_weights import StoredModel
from tests.tiny import tiny_llama
from tests.toy import read_settings, toy_recipe, toy_settings
from tests.weights.test_engine import parts
from tests.weights.test_in_process import learn_something
from whet.base.errors import ConfigError, GeneratorError, RefitError, WhetError
from whet.cluster.processes import ProcessLink
from whet.config.issues import RecipeError
from whet.learner.worker import LearnerWorker
from whet.run.build import build_sync
from whet.weights import buffers, receiver, shared_memory
from whet.weights.buffers import BufferReader, BufferWriter
from whet.weights.digest import differing, digest
from whet.weights.engine import EngineSync
from whet.weights.manifest import Entry, pack, to_text
from whet.weights.receiver import Receiver
from whet.weights.source import WeightRequest

DTYPE, SMALL, LARGE = torch.float64, 2**16, 2**18  # the largest tensor is between the two
CPU = torch.device("cpu")
Write = Callable[[BufferWriter, int, Iterable[tuple[str, Tensor]]], None]


# An engine's process


def serve(address: str) -> None:
    """Run a rank of an engine until the end is requested: a receiver over a model that stores its weights."""
    inside = Receiver(StoredModel())
    with Listener(address) as listening, listening.accept() as caller:
        while (asked := caller.recv()) is not None:
            method, args = asked
            try:
                caller.send(mapped() if method == "mapped" else getattr(inside, method)(*args))
            except WhetError as error:
                caller.send(error)


def mapped() -> int:
    """Return the number of a transport's buffers that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:whet-weights")


class Engines:
    """Ranks of engines, called as ``EngineSync`` does: while they load a bucket the next one may be written."""

    def __init__(self, addresses: list[str]) -> None:
        self._callers = [_connect(address) for address in addresses]
        self._waiting = False

    def start(self, method: str, *args: Any) -> None:
        self.wait()
        for caller in self._callers:
            caller.send((method, args))
        self._waiting = True

    def wait(self) -> list[Any]:
        answers = [caller.recv() for caller in self._callers] if self._waiting else []
        self._waiting = False
        for error in answers:
            if isinstance(error, WhetError):
                raise error
        return answers

    def call(self, method: str, *args: Any) -> list[Any]:
        self.start(method, *args)
        return self.wait()

    def close(self) -> None:
        for caller in self._callers:
            caller.send(None)
            caller.close()


def _connect(address: str) -> Any:
    end = time.monotonic() + 60
    while True:
        try:
            return Client(address)
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < end, f"no engine came to {address}"
            time.sleep(0.01)


# A learner's process; its first rank stands in for the run, too


def refit(worker: LearnerWorker, engines: Engines | None, request: WeightRequest) -> bool:
    """Return whether engines had to connect to new memory. The weights of each engine are checked."""
    if engines is None:
        worker.weights.follow(request)
        published(worker)
        return False
    connected = begin(worker, engines, request)
    digests: dict[str, int] = {}
    while (bucket := worker.weights.next()) is not None:
        digests |= bucket.digests
        engines.start("take", bucket.number)
    engines.wait()
    for report in engines.call("finish"):
        assert (differing(digests, report["digests"]), report["wrong"]) == ([], [])
    worker.weights.end()
    assert (
        differing(digest((name, tensor.to(request.dtype)) for name, tensor in published(worker).items()), digests) == []
    )
    return connected


def begin(worker: LearnerWorker, engines: Engines, request: WeightRequest) -> bool:
    handshake = worker.weights.begin(request)
    engines.call("begin", 1000, 0, to_text(handshake.manifest) if handshake.manifest is not None else None)
    if handshake.connection is not None:
        engines.call("connect", request.transport, handshake.connection, 1)
    return handshake.connection is not None


def learn(worker: LearnerWorker) -> None:
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.add_(0.01)


def take_part(
    rendezvous: str, rank: int, case: Case, folder: str, devices: list[str], script: Callable[..., Any], *args: Any
) -> Any:
    """The first ranks are the learner's, the others are engines; each is on one of ``devices``."""
    buffers.device_id = lambda _: devices[rank]
    addresses = [f"{folder}/{number}" for number in range(case.ranks, len(devices))]
    if rank >= case.ranks:
        return serve(f"{folder}/{rank}")
    worker = build(case, rendezvous, rank)
    engines = Engines(addresses) if rank == 0 else None
    try:
        return script(worker, rank, engines, *args)
    finally:
        if engines is not None:
            engines.close()


def run(
    case: Case, folder: Path, script: Callable[..., Any], *args: Any, devices: list[str] | None = None
) -> list[Any]:
    """Return the results of ``script`` on each rank of the learner, of two GPUs or of one."""
    named = devices or ["GPU 0", "GPU 1"][: case.ranks] * 2
    return on_ranks(len(named), take_part, case, str(folder), named, script, *args, deadline=120.0)[: case.ranks]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


def several_refits(worker: LearnerWorker, rank: int, engines: Engines | None) -> dict[str, Any]:
    connected: list[bool] = []
    held = []
    for size in (SMALL, SMALL, LARGE, SMALL):
        request = WeightRequest(DTYPE, size, transport="cuda_ipc", connected=1 if connected else 0)
        connected.append(refit(worker, engines, request))
        held.append((mapped(), engines.call("mapped") if engines else None))
        learn(worker)
    worker.weights.close()
    return {"connected": connected, "held": held, "after": mapped()}


@pytest.mark.parametrize(
    "layout",
    [{}, {"fsdp": 2}, pytest.param({"pipeline": 2}, marks=pytest.mark.slow)],
    ids=["one rank", "fsdp", "pipeline"],
)
def test_each_refit_arrives_on_every_device_through_two_buffers_there(
    model: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    case = Case(model, layout)
    for rank, found in enumerate(run(case, tmp_path, several_refits)):
        assert found["connected"] == [rank == 0, False, rank == 0, False]  # and again where buckets are larger
        assert found["held"] == [(2, [2] * case.ranks if rank == 0 else None)] * 4
        assert found["after"] == 0


@pytest.mark.usefixtures("forked_children")
def test_a_run_with_several_ranks_publishes_as_over_any_transport_and_calls_each_but_the_first_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks say that they are on the same device: the engine reads what the second one wrote."""

    async def go() -> None:
        changes = {"cluster": {"type": "processes"}, "parallel": {"fsdp": 2}, "optimizer": {"lr": 0.1}}
        async with parts(tiny_model, tmp_path, {"transport": "cuda_ipc"}, **changes) as (learner, engine, sync):
            for version in range(2):
                metrics = (await sync.publish(learner, engine, version)).result()
                assert metrics["refit/probe_mean"] < 1e-4
                assert metrics["refit/unread"] == 0
                await learn_something(learner)

            methods, call, buckets = [], ProcessLink.call, []
            monkeypatch.setattr(ProcessLink, "call", lambda link, c: (methods.append(c.method), call(link, c))[1])
            for transport in ("cuda_ipc", "shared_memory"):
                for mib in (1.0, 1 / 64):
                    settings = {"bucket_mb": mib, "probe": False, "transport": transport}
                    methods.clear()
                    other = EngineSync(sync.config.model_copy(update=settings), sync.text)
                    await other.publish(learner, engine, version)
                    buckets.append(methods.count("weights.next") - 1)
                    assert sorted({*methods}) == [f"weights.{name}" for name in ("begin", "end", "follow", "next")]
                    assert len(methods) == buckets[-1] + 4
            assert buckets[0] == buckets[2] == 1
            assert buckets[1] == buckets[3] > 10

            honest = engine.call

            async def dying(target: str, method: str, *args: Any) -> list[Any]:
                if (method, args) == ("take", (2,)):
                    raise GeneratorError("the engine died")
                return await honest(target, method, *args)

            monkeypatch.setattr(engine, "call", dying)
            with pytest.raises(GeneratorError, match="the engine died"):
                await other.publish(learner, engine, 2)
            await learn_something(learner)  # nothing waits for the rest of the weights
            monkeypatch.setattr(engine, "call", honest)
            await other.publish(learner, engine, 3)
            assert engine.weights_complete

    asyncio.run(go())


# Faults


def spoil(damage: Callable[[Write, BufferWriter, int, Iterator[tuple[str, Tensor]]], Any]) -> None:
    honest = BufferWriter.write
    BufferWriter.write = lambda here, bucket, named: damage(honest, here, bucket, iter(named))  # type: ignore[method-assign]


def one_rank_is_slow(worker: LearnerWorker, rank: int, engines: Engines | None) -> None:
    def late(honest: Write, here: BufferWriter, bucket: int, named: Iterator[tuple[str, Tensor]]) -> None:
        def slowly() -> Iterator[tuple[str, Tensor]]:
            for one in named:
                time.sleep(0.03)
                yield one

        return honest(here, bucket, slowly())

    if rank == 1:
        spoil(late)
    refit(worker, engines, WeightRequest(DTYPE, SMALL, transport="cuda_ipc"))


def test_a_bucket_is_taken_when_the_slowest_rank_has_written_it(model: Path, tmp_path: Path) -> None:
    run(Case(model, {"fsdp": 2}), tmp_path, one_rank_is_slow)


def one_device_is_wrong(worker: LearnerWorker, rank: int, engines: Engines | None) -> list[list[str]]:
    def scribbled(honest: Write, here: BufferWriter, bucket: int, named: Iterator[tuple[str, Tensor]]) -> None:
        return honest(here, bucket, [(name, tensor + (bucket == 2)) for name, tensor in named])

    if rank == 1:
        spoil(scribbled)
    request = WeightRequest(DTYPE, SMALL, transport="cuda_ipc")
    if engines is None:
        worker.weights.follow(request)
        return []
    begin(worker, engines, request)
    sent = []
    while (bucket := worker.weights.next()) is not None:
        sent.append(bucket.digests)
        engines.call("take", bucket.number)
    worker.weights.end()
    digests = {name: number for one in sent for name, number in one.items()}
    return [list(sent[2]), *(differing(digests, report["digests"]) for report in engines.call("finish"))]


def test_each_engine_reads_what_is_on_its_own_device(model: Path, tmp_path: Path) -> None:
    (lost, first, second), _ = run(Case(model, {"fsdp": 2}), tmp_path, one_device_is_wrong)
    assert (first, second) == ([], lost)


def one_rank_fails(worker: LearnerWorker, rank: int, engines: Engines | None, transport: Any, failing: int) -> str:
    honest = BufferWriter.write

    def broken(honest: Write, here: BufferWriter, bucket: int, named: Iterator[tuple[str, Tensor]]) -> None:
        if bucket == 2:
            next(named)  # in the midst of what ranks hand each other, one tensor after the other
            raise RuntimeError("out of memory")
        return honest(here, bucket, named)

    said, request = "", WeightRequest(DTYPE, SMALL, transport=transport)
    if rank == failing:
        spoil(broken)
    try:
        if engines is None:
            worker.weights.follow(request)
        else:
            worker.weights.begin(request)
            while (bucket := worker.weights.next()) is not None:
                assert bucket.number < 2
    except (WhetError, RuntimeError) as error:
        said = str(error)
    if engines is not None:
        worker.weights.end()
    BufferWriter.write = honest  # type: ignore[method-assign]
    refit(worker, engines, request)
    return said


def test_what_one_rank_cannot_write_fails_on_all_and_nobody_hangs(model: Path, tmp_path: Path) -> None:
    first, second = run(Case(model, {"pipeline": 2}), tmp_path, one_rank_fails, "cuda_ipc", 1)
    assert first == "rank 1 failed while writing weights for the engines: RuntimeError: out of memory"
    assert second == "out of memory"


def test_what_the_first_rank_alone_writes_and_cannot_leaves_the_others_free(model: Path, tmp_path: Path) -> None:
    script = one_rank_fails, "shared_memory", 0
    first, second = run(Case(model, {"pipeline": 2}), tmp_path, *script, devices=["the CPU"] * 4)
    assert (first, second) == ("out of memory", "")


def refused(worker: LearnerWorker, rank: int, engines: Engines | None) -> str:
    try:
        refit(worker, engines, WeightRequest(DTYPE, LARGE, transport="cuda_ipc"))
    except RefitError as error:
        if rank == 0:
            worker.weights.end()
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_engine_on_a_device_without_a_learner_is_told_what_to_set(model: Path, tmp_path: Path) -> None:
    (said,) = run(Case(model), tmp_path, refused, devices=["GPU 0", "GPU 7"])
    assert "RefitError: a rank of the engine computes on cpu (GPU 7), but the learner's ranks are on GPU 0" in said
    assert "generator.devices" in said


# The device


def test_a_bucket_counts_as_taken_when_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes asynchronously. Here the model's operations wait until the device is synchronised."""
    queue: list[Callable[[], None]] = []

    class Late(StoredModel):
        def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
            queue.append(lambda named=list(named): super(Late, self).load(named))  # type: ignore[misc]

    def settle(device: torch.device) -> None:
        while queue:
            queue.pop(0)()

    monkeypatch.setattr(receiver, "settle", settle)
    weights = [(str(number), torch.full((16,), float(number))) for number in range(6)]
    manifest = pack([(name, tensor.dtype, tensor.shape) for name, tensor in weights], torch.float32, 64)
    assert len(manifest) == len(weights)
    here, model = BufferWriter(CPU), Late()
    there = Receiver(model)
    there.begin(0, 0, to_text(manifest))
    there.connect("cuda_ipc", here.open(manifest) or (), 1)
    for bucket, one in enumerate(weights):
        here.write(bucket, [one])
        there.take(bucket)
    assert all(torch.equal(model.tensors[name], tensor) for name, tensor in weights)


def test_memory_is_let_go_with_its_last_view_on_each_side() -> None:
    gc.collect()  # what other tests left behind
    before = mapped()
    one, handle = shared_memory.share(4096, CPU)
    other = shared_memory.open_shared(handle, 4096, CPU)
    one[17] = 5
    assert other[17] == 5
    assert mapped() == before + 2
    del one
    assert not Path(handle.decode()).exists()
    other[18] = 6  # still there for processes that have opened it
    del other
    assert mapped() == before


def test_when_buffers_are_replaced_the_old_ones_stay_until_the_engines_have_the_new() -> None:
    here = BufferWriter(CPU)
    gc.collect()  # what other tests left behind
    before = mapped()
    for size, held in ((64, 2), (4096, 4)):
        here.open(((Entry("w", "uint8", (size,), 0),),))
        assert mapped() == before + held
    here.taken()
    assert mapped() == before + buffers.BUFFERS
    here.close()
    assert mapped() == before


def test_memory_of_a_gpu_is_opened_under_the_number_that_it_has_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CUDA's part what can be tried without it: the arguments that travel, and what torch calls the one changed."""
    taken = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    kinds = (torch.Tensor, torch.Size([64]), (1,), 0, torch.storage.TypedStorage, torch.uint8)
    given = (*kinds, 5, b"handle", 64, 0, False, b"counter", 0, b"event", True)
    assert len(given) == len(taken)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *args: dict(zip(taken, args, strict=True)))
    opened = shared_memory.open_shared(pickle.dumps(given), 64, torch.device("cuda", 1))
    assert opened == dict(zip(taken, given, strict=True)) | {"storage_device": 1}


def test_memory_that_cannot_be_opened_is_told() -> None:
    one, handle = shared_memory.share(64, CPU)
    del one
    with pytest.raises(RefitError, match=r"could not open .*64 bytes on cpu.* weights\.transport=collective or disk"):
        BufferReader(CPU, {"cpu": [handle]}, 64)


# Recipes


def test_recipes_that_cannot_share_a_gpu_are_refused(tiny_model: Path) -> None:
    settings: dict[str, Any] = {"weights": {"transport": "cuda_ipc"}, "generator": {"type": "vllm", "devices": "0"}}
    with pytest.raises(RecipeError, match=r"devices\.placement = split .*; set devices\.placement=colocated"):
        toy_recipe(tiny_model, **settings)
    settings["devices"] = {"placement": "colocated"}
    assert toy_recipe(tiny_model, **settings).weights.transport == "cuda_ipc"
    settings = toy_settings(tiny_model, **settings)
    settings["generator"] = {"type": "vllm", "replicas": 2}
    with pytest.raises(RecipeError, match=r"generator\.devices doesn't name them"):
        read_settings(settings)
    settings["generator"] = {"type": "vllm", "replicas": 2, "devices": "0,0"}
    with pytest.raises(RecipeError, match=r"generator\.devices = '0,0' names a GPU twice"):
        read_settings(settings)


def test_the_learner_decides_whether_there_is_a_gpu(tiny_model: Path) -> None:
    """Not the process that starts the run: a cluster may show it none."""
    settings: dict[str, Any] = {"weights": {"transport": "cuda_ipc"}, "devices": {"placement": "colocated"}}
    recipe = toy_recipe(tiny_model, generator={"type": "vllm", "devices": "0"}, **settings)
    assert not torch.cuda.is_available()
    build_sync(recipe, [1, 2])
    recipe.weights.check_device("cuda:3")
    with pytest.raises(ConfigError, match=r"cuda_ipc .* computes on cpu; set weights\.transport=shared_memory"):
        recipe.weights.check_device("cpu")


def test_engines_on_a_learners_nodes_have_its_gpus_and_so_need_another_transport_than_nccl(tiny_model: Path) -> None:
    settings: dict[str, Any] = {"cluster": {"type": "ray"}, "devices": {"placement": "colocated"}}
    settings |= {"parallel": {"fsdp": 4}, "generator": {"type": "vllm", "on_cluster": True, "tensor": 2, "replicas": 2}}
    recipe = toy_recipe(tiny_model, **settings)
    assert recipe.shares_nodes
    recipe.weights.check_device("cpu", recipe.shares_nodes)
    with pytest.raises(ConfigError, match=r"NCCL refuses to send; set weights\.transport=cuda_ipc"):
        recipe.weights.check_device("cuda:0", recipe.shares_nodes)
    recipe = toy_recipe(tiny_model, weights={"transport": "cuda_ipc"}, **settings)
    recipe.weights.check_device("cuda:0", recipe.shares_nodes)
    toy_recipe(tiny_model, weights={"transport": "shared_memory"}, **settings).weights.check_device("cuda:0", True)
    settings["parallel"] = {"fsdp": 2}
    with pytest.raises(RecipeError, match=r"2 replicas have 4 ranks and the learner has 2; lower generator\.replicas"):
        toy_recipe(tiny_model, **settings)


def test_a_collective_between_two_processes_on_one_gpu_is_refused(tiny_model: Path) -> None:
    settings: dict[str, Any] = {"weights": {"transport": "collective"}, "devices": {"placement": "colocated"}}
    with pytest.raises(RecipeError, match=r"NCCL, which refuses two ranks .* set weights\.transport=cuda_ipc"):
        toy_recipe(tiny_model, generator={"type": "vllm", "devices": "0"}, **settings)
    toy_recipe(tiny_model, generator={"type": "vllm"}, **settings)  # on CPUs, by gloo
