"""Calls of workers in other processes arrive unchanged, without copies of tensors."""

import pickle
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tests.learner.parts import some_batch, whole
from whet.cluster.message import packed, unpacked
from whet.core.batch import Batch
from whet.core.packing import pack
from whet.core.types import Episode, Group, Span, Task, Trajectory


def sent(value: Any) -> tuple[Any, bytearray]:
    message = bytearray().join(packed(value))
    return unpacked(message), message


def test_a_batch_arrives_unchanged_and_writable() -> None:
    batch = some_batch().weigh("token")
    batch.fill("mine", torch.arange(3 * len(batch), dtype=torch.int32).reshape(-1, 3).flip(1))
    (received,), _ = sent(tuple(micro.batch for micro in whole(batch)))
    assert isinstance(received, Batch)
    for field in fields(batch):
        ours, theirs = getattr(batch, field.name), getattr(received, field.name)
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else type(ours) is type(theirs), field.name
    assert torch.equal(received.column("mine"), batch.column("mine"))
    assert received.weight is not None
    received.weight.mul_(2)


def test_tensors_of_every_kind_arrive_unchanged() -> None:
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    values = [torch.arange(12).reshape(3, 4).to(kind) for kind in kinds]
    values += [torch.tensor(2.5), torch.zeros(0), torch.arange(10)[2:8:2], torch.ones(2, requires_grad=True)]
    received, _ = sent(values)
    for ours, theirs in zip(values, received, strict=True):
        assert theirs.dtype == ours.dtype
        assert theirs.requires_grad == ours.requires_grad
        assert torch.equal(ours, theirs)


def test_tensors_are_not_copied_by_either_side() -> None:
    value = torch.arange(100_000)
    address = value.numpy().__array_interface__["data"][0]
    parts = packed(("update", value))
    assert any(part.nbytes == value.nbytes and _address(part) == address for part in parts)
    (_, received), message = sent(("update", value))
    start = _address(memoryview(message))
    assert start <= received.data_ptr() < start + len(message)
    assert received.data_ptr() % 16 == 0
    assert len(message) < value.nbytes + len(pickle.dumps("update")) + 1000


def test_a_micro_batch_is_sent_as_its_columns_alone() -> None:
    """Token, mask, log-prob of the sampler, weight and advantage; where it lies in the whole batch is a number for each
    segment, and not for each token."""
    answer = Span(list(range(1000)), True, [-1.0] * 1000, (0, 0))
    episodes = [Episode([Trajectory([Span([1, 2, 3], False), answer])], reward=float(i)) for i in range(20)]
    batch = Batch.from_groups([Group("g", Task("g", []), episodes)]).weigh("token")
    batch.fill("advantages", batch.per_token(batch.reward))
    shards = pack(batch, 2, 4096)
    (received, _), _ = sent(shards)
    assert [micro.tokens.tolist() for micro in received] == [micro.tokens.tolist() for micro in shards[0]]
    bytes_sent = sum(len(part) for shard in shards for part in packed(shard))
    assert bytes_sent < (8 + 1 + 4 + 8 + 8) * len(batch) + 8000 * sum(map(len, shards))


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
