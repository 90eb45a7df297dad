"""What brings the weights of a learner to a generator, whatever lies between them."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor

from whet.learner.base import Learner
from whet.metrics import Metrics


class WeightSync(Protocol):
    """The way of weights to one generator. Arrival is proven before anything that was sampled is learned from."""

    async def publish(
        self, learner: Learner, generator: Any, version: int, weights: Iterable[tuple[str, Tensor]] | None = None
    ) -> Metrics:
        """Returns once the generator samples from the learner's weights. Raises ``RefitError`` naming what differs.
        ``weights`` are the learner's, where they were gathered already."""
        ...

    async def load(self, weights: Iterable[tuple[str, Tensor]], generator: Any, version: int) -> Metrics:
        """The same from (Hugging Face name, tensor) pairs; without a learner there is no probe."""
        ...


def in_buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The same pairs in the same order, at most ``max_bytes`` at a time; a larger tensor comes alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
