"""The speed at which weights reach an engine: each transport, and a plain copy of the same bytes in the same run.

    python benchmarks/refit.py [--megabytes 512] [--tensors 290] [--small 10000] [--json FILE]

The receiving side is a separate process. "Delivered" ends where it can read every tensor in its own memory; otherwise
it also copies them into tensors that it holds, as an engine without kernels would; in-process means that copy alone.
These are measured bare and with their proofs (digests on both sides, columns read back). The second part sends a model
of many small tensors, where describing them would cost more than the bytes: the first publication describes them, later
ones don't. Contestants take turns; the ratio to the plain copy is what to read.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import Tensor

from whet.base.errors import WhetError
from whet.weights.config import WeightSyncConfig
from whet.weights.digest import differing, digest
from whet.weights.engine import EngineSync
from whet.weights.receiver import LoadableAdapter, Receiver
from whet.weights.sender import LocalSource


class Listed:
    """``NamedTensors`` that are in memory."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        self.named = named

    def described(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in self.named]

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self.named


class Held:
    """A model that holds tensors and computes nothing."""

    rank = 0
    device = torch.device("cpu")
    rounding = 0.0

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def adapter(self, rank: int, alpha: float) -> LoadableAdapter:
        raise WhetError("this benchmark sends whole weights, no adapters")

    def begin(self) -> None: ...

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            if name in self.tensors:
                self.tensors[name].copy_(tensor)
            else:
                self.tensors[name] = tensor.clone()

    def finish(self) -> list[str]:
        return []

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def read_back(self, name: str, columns: list[int]) -> Tensor:
        return self.tensors[name][:, columns] if columns else self.tensors[name]


class Reading(Held):
    """A model that has nothing to copy."""

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None: ...


def receive(wire: Connection, holds: bool) -> None:
    """The other process."""
    torch.set_num_threads(1)
    receiver = Receiver(Held() if holds else Reading())
    while (message := wire.recv()) is not None:
        method, args = message
        wire.send(getattr(receiver, method)(*args))


class Process:
    """An engine in another process, as far as weights go."""

    ranks = 1
    dtype = torch.bfloat16

    def __init__(self, holds: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self.wire, theirs = context.Pipe()
        self.process = context.Process(target=receive, args=(theirs, holds), daemon=True)
        self.process.start()
        self.sent = 0  # bytes of messages

    async def call(self, target: str, method: str, *args: Any) -> list[Any]:
        message = (method, args)
        self.sent += len(repr(message))
        await asyncio.to_thread(self.wire.send, message)
        return [await asyncio.to_thread(self.wire.recv)]

    @asynccontextmanager
    async def refit(self, version: int, adapter: bool = False) -> AsyncIterator[list["Process"]]:
        yield [self]

    async def close(self) -> None:
        self.wire.send(None)
        self.process.join(10)


def model(count: int, megabytes: float) -> list[tuple[str, Tensor]]:
    """Matrices of bfloat16, of equal size."""
    rows = max(1, int(megabytes * 2**20 / count / 2 / 64))
    return [(f"layer.{i}.weight", torch.randn(rows, 64).bfloat16()) for i in range(count)]


async def seconds_of(sync: EngineSync, engine: Any, named: list[tuple[str, Tensor]], rounds: int) -> list[float]:
    source: Any = LocalSource(Listed(named))  # in place of a learner: only its weights are asked for
    taken = []
    for version in range(rounds + 1):
        started = time.perf_counter()
        await sync.publish(source, engine, version)
        taken.append(time.perf_counter() - started)
    source.close()
    return taken[1:]


def in_process(named: list[tuple[str, Tensor]], targets: list[tuple[str, Tensor]], proof: bool) -> None:
    for (_, source), (_, target) in zip(named, targets, strict=True):
        target.copy_(source)
    if proof and differing(digest(named), digest(targets)):
        raise SystemExit("the copy differs")


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    work()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


async def large(named: list[tuple[str, Tensor]], rounds: int) -> dict[str, list[float]]:
    targets = [(name, torch.empty_like(tensor)) for name, tensor in named]
    flat = torch.cat([tensor.reshape(-1) for _, tensor in named])
    laps = {"plain copy": timed(partial(torch.empty_like(flat).copy_, flat), rounds)}
    del flat
    for transport in ("shared_memory", "collective"):
        laps[transport.replace("_", " ") + ", delivered"] = await published(transport, named, rounds, holds=False)
    for proof in (False, True):
        words = ", proven" if proof else ""
        laps["in process" + words] = timed(partial(in_process, named, targets, proof), rounds)
        for transport in ("shared_memory", "disk", "collective"):
            laps[transport.replace("_", " ") + words] = await published(transport, named, rounds, proof=proof)
    return laps


async def published(
    transport: Any, named: list[tuple[str, Tensor]], rounds: int, *, proof: bool = False, holds: bool = True
) -> list[float]:
    engine = Process(holds)
    sync = EngineSync(WeightSyncConfig(transport=transport, digest=proof, probe=False), [0, 0])
    try:
        return await seconds_of(sync, engine, named, rounds)
    finally:
        await engine.close()


async def small(named: list[tuple[str, Tensor]], rounds: int) -> tuple[list[int], list[float]]:
    """(bytes of messages, seconds) of each publication."""
    engine: Any = Process()
    sync = EngineSync(WeightSyncConfig(digest=False, probe=False), [0, 0])
    source: Any = LocalSource(Listed(named))
    sent, taken = [], []
    for version in range(rounds + 1):
        before, started = engine.sent, time.perf_counter()
        await sync.publish(source, engine, version)
        taken.append(time.perf_counter() - started)
        sent.append(engine.sent - before)
    source.close()
    await engine.close()
    return sent, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=512)
    parser.add_argument("--tensors", type=int, default=290)
    parser.add_argument("--small", type=int, default=10_000, help="tensors of the second part, of 8 KiB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()

    named = model(args.tensors, args.megabytes)
    size = sum(tensor.nbytes for _, tensor in named) / 1e9
    laps = asyncio.run(large(named, args.rounds))
    plain = statistics.median(laps["plain copy"])
    print(f"{size:.2f} GB in {args.tensors} tensors of bfloat16")
    for name, taken in laps.items():
        median = statistics.median(taken)
        print(f"{name:24} {median:6.3f} s  {size / median:6.2f} GB/s  {median / plain:5.1f} times a plain copy")
    sent, taken = asyncio.run(small(model(args.small, args.small / 128), args.rounds))
    print(
        f"{args.small} tensors of 8 KiB: {sent[0]} characters of messages and {taken[0]:.2f} s for the first "
        f"publication, {sent[-1]} and {statistics.median(taken[1:]):.2f} s for a later one"
    )
    if args.json:
        result = {"machine": describe(), "gigabytes": size, "seconds": laps, "messages": sent, "small": taken}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
