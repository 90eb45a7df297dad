"""The learner's end of a refit: computes the weights a bucket at a time, casts them, takes their digests and writes
them to a transport. Runs where the weights are, in the process of the learner's first rank; its additional memory is
one bucket and the transport's buffers, never a whole model.

All ranks iterate together, because gathering needs all of them. The first rank communicates with the engines; the
request determines whether the other ranks write as well. ``LocalSource`` sends weights of this process, as from a
learner.

Who waits for whom: the controller calls the first rank for each bucket, and the other ranks once, to ``follow`` it.
Before each bucket these wait until the first rank says that it continues or ends, up to the deadline of the learner's
collectives.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from whet.base.errors import DeadlineError, RefitError
from whet.parallel.mesh import Ranks
from whet.processes.compute import compute
from whet.weights.config import usual_bucket
from whet.weights.digest import tensor_digest
from whet.weights.manifest import Entry, Manifest, pack
from whet.weights.shared_memory import machine
from whet.weights.source import Bucket, Handshake, NamedTensors, WeightRequest
from whet.weights.transport import Writer, open_writer


class Sender:
    """``weights``: returns the weights of a request; ``ranks``: the ranks that have them, including this one, or None
    for a single one; ``device``: the device of this rank's tensors; ``leaves``: whether tensors returned to the caller
    leave this process; ``host``: the address at which engines can reach it."""

    def __init__(
        self,
        weights: Callable[[WeightRequest], NamedTensors],
        ranks: Ranks | None = None,
        device: torch.device | None = None,
        leaves: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        self._weights, self._ranks, self._leaves, self._host = weights, ranks, leaves, host
        self._device = device or torch.device("cpu")
        self._first = ranks is None or ranks.info.rank == 0
        self._writer: Writer | None = None  # this rank's transport
        self._connections = 0  # that were opened; the last one is current
        self._manifest: Manifest = ()  # the receivers' current manifest
        self._buckets: Iterator[Bucket] = iter(())
        self._gathering = False  # a tensor is being made, and other ranks may wait for this one's part

    def begin(self, request: WeightRequest) -> Handshake:
        """Start a new transfer, even after an incomplete one. Receivers of an earlier connection get a new one, because
        other receivers have taken their place."""
        self._gathering = False
        size = request.bucket_bytes or usual_bucket(request.transport, self._device.type == "cuda")
        weights = self._weights(replace(request, bucket_bytes=size))
        manifest, unchanged, connection = pack(weights.described(), request.dtype, size), False, None
        if request.transport is not None:
            if request.connected != self._connections or self._connections == 0:
                self.close()
                self._connections += 1
            unchanged, self._manifest = manifest == self._manifest, manifest
            if self._first or request.every_rank:
                self._writer = self._writer or open_writer(request, self._device, self._ranks, self._host)
                connection = self._writer.open(manifest)
        self._buckets = self._send(request, manifest, iter(weights.tensors()))
        return Handshake(machine(), None if unchanged else manifest, connection, self._connections)

    @torch.no_grad()
    def next(self) -> Bucket | None:
        """Return the next bucket; None when all were sent. On other ranks than the first it is empty."""
        return next(self._buckets, None)

    @torch.no_grad()
    def follow(self, request: WeightRequest) -> None:
        """Take part in a transfer of the first rank, until that rank runs ``end``. An error is raised at once if other
        ranks wait for this one; otherwise, as they have it too, when the first rank continues or ends."""
        failed: Exception | None = None
        try:
            self.begin(request)
        except Exception as error:
            failed = error
        while self._first_continues():
            if failed is not None:
                raise failed
            try:
                next(self._buckets)
            except Exception as error:
                if self._gathering:
                    raise
                failed = error
        self.end()
        if failed is not None:
            raise failed

    def end(self) -> None:
        """End the transfer, complete or not: release the data that the receivers have taken."""
        if self._ranks is not None and self._first:
            self._ranks.broadcast(False)
        self._buckets = iter(())
        if self._writer is not None:
            self._writer.taken()

    def close(self) -> None:
        self._buckets, self._manifest = iter(()), ()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _send(
        self, request: WeightRequest, manifest: Manifest, tensors: Iterator[tuple[str, Tensor]]
    ) -> Iterator[Bucket]:
        writer = self._writer if request.transport is not None else None
        for number, entries in enumerate(manifest):
            if self._ranks is not None and self._first:
                self._ranks.broadcast(True)
            bucket, failed = Bucket(number, bytes=sum(entry.size for entry in entries)), None
            named = self._cast(entries, request, tensors, bucket.digests)
            try:
                if writer is not None:
                    bucket = replace(bucket, bytes=writer.write(number, named))
                elif self._first:
                    bucket.tensors.extend((name, tensor.cpu() if self._leaves else tensor) for name, tensor in named)
            except Exception as error:
                if self._gathering:  # the progress of the other ranks is unknown
                    raise
                failed = error
            for _ in named:  # the other ranks need this rank for gathering, even after an error
                pass
            self._agree(failed, request)
            yield bucket

    def _cast(
        self,
        entries: tuple[Entry, ...],
        request: WeightRequest,
        tensors: Iterator[tuple[str, Tensor]],
        digests: dict[str, int],
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the bucket's tensors in their final form, each computed when it is requested."""
        travels = request.transport is not None or self._leaves or self._ranks is not None
        for entry in entries:
            self._gathering = True
            name, tensor = next(tensors)
            if name != entry.name:
                raise RefitError(
                    f"the learner's weights changed while they were sent: got {name} instead of {entry.name}"
                )
            tensor = tensor.to(request.dtype)
            if self._first and request.digest and travels:
                digests[name] = tensor_digest(tensor)
            self._gathering = False
            yield name, tensor

    def _first_continues(self) -> bool:
        """Return whether the first rank makes another bucket; False at its ``end``."""
        assert self._ranks is not None
        rank, seconds = self._ranks.info.rank, self._ranks.timeout.total_seconds()
        try:
            return self._ranks.broadcast(False)
        except RuntimeError as error:  # torch's errors
            raise DeadlineError(
                f"rank {rank} of the learner waited for the first rank to send more weights, which is gone or did not "
                f"continue within {seconds:g} s (see learner.deadline): {error}"
            ) from error

    def _agree(self, failed: Exception | None, request: WeightRequest) -> None:
        """Raise this rank's error. If all ranks write, they fail together, and continue when all have written."""
        if self._ranks is None or not request.every_rank:
            if failed is not None:
                raise failed
            return
        with self._ranks.fail_together("writing weights for the engines"):
            if failed is not None:
                raise failed


class LocalSource:
    """A ``WeightSource`` in this process."""

    def __init__(self, weights: NamedTensors) -> None:
        self._sender = Sender(lambda _: weights)

    async def begin_weights(self, request: WeightRequest) -> Handshake:
        if request.transport == "cuda_ipc":  # the weights are not on the engine's devices
            request = replace(request, transport="shared_memory")
        return await compute(self._sender.begin, request)

    async def next_weights(self) -> Bucket | None:
        return await compute(self._sender.next)

    async def end_weights(self) -> None:
        await compute(self._sender.end)

    def abandon_weights(self) -> None:
        """Nothing waits for the rest of the transfer."""

    def close(self) -> None:
        """Close the transport, even during a transfer."""
        self._sender.close()
