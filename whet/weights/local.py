"""Weights that this process holds, and weights that pass through it, for a sync to take as from a learner."""

from dataclasses import replace

from whet.processes.compute import compute
from whet.weights.parcel import Layout, Named, Opening, Parcel, Sending, WeightSource
from whet.weights.sender import Sender, machine
from whet.weights.shared_memory import SharedMemory


class LocalSource:
    """A ``WeightSource`` in this process."""

    def __init__(self, weights: Named) -> None:
        self._sender = Sender(lambda _: weights)

    async def begin_weights(self, sending: Sending) -> Opening:
        if sending.transport == "cuda_ipc":  # they are not on the engine's devices
            sending = replace(sending, transport="shared_memory")
        return await compute(self._sender.begin, sending)

    async def next_weights(self) -> Parcel | None:
        return await compute(self._sender.next)

    async def end_weights(self) -> None:
        await compute(self._sender.end)

    def close(self) -> None:
        """Let go of what carried them, also in the midst of it."""
        self._sender.close()


class Relay:
    """A ``WeightSource`` for shared memory where the learner's first rank is on another machine: buckets come here as
    messages, one at a time, and go on through this machine's memory."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self._memory = SharedMemory()
        self._layout: Layout = []
        self._bucket = 0

    async def begin_weights(self, sending: Sending) -> Opening:
        opening = await self.source.begin_weights(replace(sending, transport=None))
        if opening.layout is not None:
            self._layout = opening.layout
        self._bucket = 0
        return replace(opening, setup=self._memory.open(self._layout), machine=machine())

    async def next_weights(self) -> Parcel | None:
        parcel = await self.source.next_weights()
        if parcel is None:
            return None
        arguments = await compute(self._memory.write, self._bucket, parcel.tensors)
        self._bucket += 1
        return replace(parcel, method=self._memory.method, arguments=arguments, tensors=[])

    async def end_weights(self) -> None:
        self._memory.sent()
        await self.source.end_weights()

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
