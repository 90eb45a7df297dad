"""Refits that send only the weights whose bits changed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.weights.test_engine import TwoRanks, two_engines
from whet.base.errors import RefitError
from whet.cluster.config import DevicesConfig
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.weights.config import WeightSyncConfig
from whet.weights.delta import apply, difference
from whet.weights.engine import EngineSync
from whet.weights.sender import LocalSource


def memory(size: int, seed: int) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("changed", [0, 1, 7, 100])
def test_what_changed_turns_the_old_into_the_new(itemsize: int, changed: int) -> None:
    old = memory(8 * 400, 0)
    new = old.clone()
    places = torch.randperm(len(old) // itemsize, generator=torch.Generator().manual_seed(1))[:changed]
    new.view(-1, itemsize)[places, 0] += 1  # the bytes of an element change together or not at all
    payload = difference(new, old, itemsize)
    assert payload is not None
    assert len(payload) == changed * (4 + itemsize)
    apply(payload, old, itemsize)
    assert torch.equal(old, new)


def test_a_difference_as_large_as_the_whole_is_none() -> None:
    assert difference(memory(64, 0), memory(64, 1), 2) is None
    assert difference(memory(64, 0), memory(64, 1), 8) is None


@pytest.mark.parametrize("payload", [[0, 0, 0], [200, 0, 0, 0, 1, 1], [255, 255, 255, 255, 1, 1]], ids=str)
def test_a_payload_that_does_not_fit_is_refused(payload: list[int]) -> None:
    with pytest.raises(RefitError, match="don't fit"):
        apply(torch.tensor(payload, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8), 2)


class Publications:
    """Weights of several buckets, published again and again to two engines of two ranks each."""

    def __init__(self, tmp_path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.router, sync, self.weights = two_engines(tmp_path, "collective")
        self.sync = EngineSync(sync.config.model_copy(update={"delta": True}), [])
        self.source, self.dtype, self.version = LocalSource(self.weights), dtype, 0
        for engine in self.router.replicas:
            engine.dtype = dtype
        self.size = sum(tensor.numel() for _, tensor in self.weights.named) * dtype.itemsize

    def publish(self) -> int:
        """Return the bytes that travelled, after all ranks were found to have all weights."""

        async def go() -> Any:
            return await self.sync._refit(self.source, self.router, self.version)

        self.version += 1
        _, metrics = asyncio.run(go())
        for model in [model for engine in self.router.replicas for model in engine.models]:
            assert all(torch.equal(model.held[name], tensor.to(self.dtype)) for name, tensor in self.weights.named)
        return round(metrics.result()["refit/gigabytes"] * 1e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_weights_that_changed_travel_and_all_arrive(tmp_path: Path, dtype: torch.dtype) -> None:
    publications = Publications(tmp_path, dtype)
    assert publications.publish() == publications.size, "the first time all of them"
    assert publications.publish() == 0
    first, *_, last = [tensor for _, tensor in publications.weights.named]
    first[3, 5] *= -1
    last[:2, 7] += 1
    assert publications.publish() == 3 * (4 + dtype.itemsize)
    first *= 1 + 2**-20  # in bfloat16 all round to the same bits
    assert publications.publish() == (0 if dtype == torch.bfloat16 else 2 * first.nbytes)  # or its bucket
    for _, tensor in publications.weights.named:
        tensor.neg_()
    assert publications.publish() == publications.size


def test_an_engine_in_the_place_of_a_lost_one_gets_whole_buckets(tmp_path: Path) -> None:
    publications = Publications(tmp_path)
    publications.publish()
    publications.router.replicas[0] = TwoRanks()
    publications.router.replicas[0].dtype = torch.bfloat16
    assert publications.publish() == publications.size
    assert publications.publish() == 0


def test_other_buckets_start_whole(tmp_path: Path) -> None:
    publications = Publications(tmp_path)
    publications.publish()
    publications.sync.config = publications.sync.config.model_copy(update={"bucket_mb": 1.0})
    assert publications.publish() == publications.size
    assert publications.publish() == 0
    assert len(publications.router.replicas[0].receivers[0]._reader._kept) == 1, "the others were released"


def test_the_digest_finds_a_copy_that_is_not_what_was_sent(tmp_path: Path) -> None:
    publications = Publications(tmp_path)
    publications.publish()
    kept = publications.router.replicas[1].receivers[1]._reader._kept
    kept[0][9] += 1
    with pytest.raises(RefitError, match=r"rank 1 of the engine: .* 1 of 8 tensors .* the first 0"):
        publications.publish()
    assert publications.publish() == publications.size, "what engines have is unknown, so all of it is sent"


def test_changes_without_the_whole_before_them_are_refused(tmp_path: Path) -> None:
    publications = Publications(tmp_path)
    publications.publish()
    publications.router.replicas[0].receivers[0]._reader._kept.clear()
    with pytest.raises(RefitError, match="never had it whole"):
        publications.publish()
    for receiver in [receiver for engine in publications.router.replicas for receiver in engine.receivers]:
        receiver._reader.close()  # so that no broadcast waits for its deadline where the garbage collector ends it


def test_changes_alone_are_for_a_network() -> None:
    config = WeightSyncConfig(delta=True)
    (problem,) = config.problems(VllmGeneratorConfig(), None, DevicesConfig())
    assert "weights.transport=collective" in problem
