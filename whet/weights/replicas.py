"""Weights for several replicas of a generator: each has a way of its own, and each proves arrival."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from whet.generators.router import Router
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.weights.base import WeightSync


class ReplicasSync:
    """``ways`` to the replicas of a router, in their order."""

    def __init__(self, ways: Sequence[WeightSync]) -> None:
        self.ways = tuple(ways)

    async def publish(
        self, learner: Learner, generator: Router, version: int, weights: Iterable[tuple[str, Tensor]] | None = None
    ) -> Metrics:
        """See ``WeightSync``. The weights are gathered once. All replicas stop before the first gets new ones; then
        each goes on as soon as it has them."""
        await generator.pause()
        generator.weights_changed()
        named = list(await learner.named_weights() if weights is None else weights)
        metrics = Metrics()
        for way, replica in zip(self.ways, generator.replicas, strict=True):
            metrics.merge(await way.publish(learner, replica, version, named))
        return metrics

    async def load(self, weights: Iterable[tuple[str, Tensor]], generator: Router, version: int) -> Metrics:
        """See ``WeightSync``."""
        await generator.pause()
        generator.weights_changed()
        named = list(weights)
        metrics = Metrics()
        for way, replica in zip(self.ways, generator.replicas, strict=True):
            metrics.merge(await way.load(named, replica, version))
        return metrics
