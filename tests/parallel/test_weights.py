"""Weights that are sharded over ranks are sent by rank 0 in buckets: no rank ever has the whole model in memory."""

import weakref
from collections.abc import Iterable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.learner.parts import published
from tests.parallel.cases import Case, build
from tests.parallel.ranks import on_ranks
from whet.base.errors import DeadlineError
from whet.weights import named_weights
from whet.weights.digest import differing, digest
from whet.weights.manifest import to_text
from whet.weights.named_weights import ModelWeights, StagedWeights
from whet.weights.receiver import Receiver
from whet.weights.source import Content, WeightRequest

BUCKET = 8 * 1024


class StoredModel:
    """A model that keeps the received tensors."""

    rank = 0
    device = torch.device("cpu")
    rounding = 0.0

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def begin(self) -> None: ...

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in named}

    def finish(self) -> list[str]:
        return []

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def read_back(self, name: str, columns: list[int]) -> Tensor:
        return self.tensors[name][:, columns] if columns else self.tensors[name]


class Alive:
    """Counts the bytes of live tensors that are not the model's parameters."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._watched: set[int] = set()

    def watch(self, tensor: Tensor) -> Tensor:
        key, size = id(tensor), tensor.nbytes
        if key not in self._watched:
            self._watched.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(tensor, self._forget, key, size)
        return tensor

    def _forget(self, key: int, size: int) -> None:
        self._watched.discard(key)
        self.now -= size


def send(
    rendezvous: str, rank: int, case: Case, transport: str | None, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Send the weights twice to a receiver in rank 0's process; return the memory that was used for it."""
    worker, alive, model = build(case, rendezvous, rank), Alive(), StoredModel()
    expected = {name: tensor.to(dtype, copy=True) for name, tensor in published(worker).items()}
    gathered = set()
    kind = StagedWeights if "pipeline" in case.parallel else ModelWeights
    full_tensors, tensors = named_weights.full_tensors, kind.tensors
    if kind is ModelWeights:  # otherwise it yields the stage's own parameters

        def watched(tensors: list[Tensor], device: torch.device, everywhere: bool) -> Iterator[Tensor]:
            gathered.update(tensor.dtype for tensor in tensors)
            return (alive.watch(tensor) for tensor in full_tensors(tensors, device, everywhere))

        named_weights.full_tensors = watched
    kind.tensors = lambda self: ((name, alive.watch(tensor)) for name, tensor in tensors(self))
    receiver = Receiver(model)
    buckets = 0
    for connected in (0, 1):
        request = WeightRequest(dtype, BUCKET, transport=transport, connected=connected)
        if rank > 0:
            worker.weights.follow(request)
            continue
        handshake = worker.weights.begin(request)
        receiver.begin(1000, 0, to_text(handshake.manifest) if handshake.manifest is not None else None)
        connecting = None
        if handshake.connection is not None:  # in a broadcast it waits for the sender
            connecting = Thread(target=receiver.connect, args=(transport, handshake.connection, 1))
            connecting.start()
        digests, buckets = {}, 0
        while (bucket := worker.weights.next()) is not None:
            digests |= bucket.digests
            buckets += 1
            if connecting is not None:
                connecting.join()
            if transport is not None:
                receiver.take(bucket.number)
            model.load(bucket.tensors)
            del bucket
        worker.weights.end()
        arrived = digest(model.tensors.items())
        assert differing(digests, arrived) == differing(digest(expected.items()), arrived) == []
        assert transport is None or receiver.finish()["wrong"] == []
    sizes = [tensor.nbytes for tensor in expected.values()]
    return {"peak": alive.peak, "buckets": buckets, "model": sum(sizes), "largest": max(sizes), "gathered": gathered}


@pytest.mark.parametrize("transport", [None, "shared_memory", "disk", "collective", "cuda_ipc"])
def test_sending_needs_the_memory_of_one_bucket(models, transport):
    first, second = on_ranks(2, send, Case(models["qwen"], {"fsdp": 2}), transport)
    most = max(BUCKET, first["largest"])
    assert first["model"] > 6 * most
    assert first["buckets"] > 6
    assert 0 < first["peak"] <= most
    assert 0 < second["peak"] <= most


def test_stages_of_a_pipeline_send_their_parts_in_turn(models):
    first, _ = on_ranks(2, send, Case(models["qwen"], {"pipeline": 2}), "shared_memory")
    most = max(BUCKET, first["largest"]) + 2 * first["largest"]  # the current tensor, and the one before
    assert 0 < first["peak"] <= most
    assert first["buckets"] > 6


def test_weights_are_gathered_in_the_dtype_in_which_they_are_sent(models):
    for memory in on_ranks(2, send, Case(models["qwen"], {"fsdp": 2}), "shared_memory", torch.float32):
        assert memory["gathered"] == {torch.float32}


def test_stages_send_weights_in_a_narrower_dtype(models):
    first, _ = on_ranks(2, send, Case(models["qwen"], {"pipeline": 2}), "shared_memory", torch.bfloat16)
    assert first["buckets"] > 1


@pytest.mark.parametrize(
    "layout", [{"fsdp": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)], ids=["fsdp", "tensor"]
)
def test_an_adapter_is_merged_a_matrix_at_a_time(models, layout):
    """While a matrix is merged, it and its sum need memory in addition to the bucket."""
    first, second = on_ranks(2, send, Case(models["llama"], layout, lora=True), "shared_memory")
    most = max(BUCKET, first["largest"]) + 2 * first["largest"]
    assert first["model"] > 3 * most
    assert 0 < first["peak"] <= most
    assert 0 < second["peak"] <= most


def contents(rendezvous: str, rank: int, case: Case) -> dict[Content, dict[str, Tensor]]:
    """Return the tensors that rank 0 sends, by kind of request."""
    worker, sent = build(case, rendezvous, rank), dict[Content, dict[str, Tensor]]()
    for content in ("merged", "base", "adapter"):
        request = WeightRequest(torch.float64, BUCKET, content=content)
        if rank > 0:
            worker.weights.follow(request)
            continue
        worker.weights.begin(request)
        sent[content] = {}
        while (bucket := worker.weights.next()) is not None:
            sent[content] |= {name: tensor.clone() for name, tensor in bucket.tensors}
        worker.weights.end()
    return sent


@pytest.mark.parametrize(
    "layout",
    [
        {"fsdp": 2},
        pytest.param({"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"replicas": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=["fsdp", "pipeline", "tensor", "replicas and fsdp", "tensor and fsdp"],
)
def test_frozen_weights_plus_adapter_equal_the_merged_weights_in_any_layout(models, layout):
    case = Case(models["llama"], layout, lora=True)
    (alone,) = on_ranks(1, contents, case.one_rank())
    first, *_ = on_ranks(case.ranks, contents, case)
    for content, expected in alone.items():
        assert first[content].keys() == expected.keys()
        assert all(torch.equal(first[content][name], tensor) for name, tensor in expected.items())
    layers = {name.rpartition(".lora_")[0] for name in first["adapter"]}
    assert len(layers) == 14
    for name, frozen in first["base"].items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if layer in layers:
            a, b = (first["adapter"][f"{layer}.lora_{kind}.weight"] for kind in "AB")
            frozen = frozen + 2.0 * (b @ a)
        torch.testing.assert_close(first["merged"][name], frozen, rtol=0, atol=1e-14)


def left_alone(rendezvous: str, rank: int, case: Case) -> str:
    """The first rank ends in the midst of a transfer."""
    worker, request = build(case, rendezvous, rank), WeightRequest(torch.float64, BUCKET)
    if rank == 0:
        worker.weights.begin(request)
        worker.weights.next()
        return ""
    with pytest.raises(DeadlineError) as caught:
        worker.weights.follow(request)
    return str(caught.value)


def test_a_rank_whose_first_rank_is_gone_says_so(models):
    _, said = on_ranks(2, left_alone, Case(models["qwen"], {"fsdp": 2}))
    assert "rank 1 of the learner waited for the first rank to send more weights" in said
