"""Weights of this process, for a sync to send as from a learner."""

from dataclasses import replace

from whet.processes.compute import compute
from whet.weights.sender import Sender
from whet.weights.source import Bucket, Handshake, NamedTensors, WeightRequest


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

    def close(self) -> None:
        """Close the transport, even during a transfer."""
        self._sender.close()
