"""What brings the weights of a learner to a generator, whatever lies between them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from whet.cluster.lease import Devices
from whet.errors import GeneratorError, WhetError
from whet.generators.router import Router
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.weights.parcel import Named

T = TypeVar("T")
NOBODY_SHARES = Devices({}, shared=False)


class WeightSync(Protocol):
    """The way of weights to a generator, or to all replicas of a router at once. Arrival is proven before anything that
    was sampled is learned from."""

    async def publish(self, learner: Learner, generator: Any, version: int) -> Metrics:
        """Returns once the generator samples from the learner's weights. Raises ``RefitError`` naming what differs."""
        ...

    async def load(self, weights: Named, generator: Any, version: int) -> Metrics:
        """The same from weights that this process holds; without a learner there is no probe."""
        ...


def replicas(generator: Any) -> Sequence[Any]:
    """The generators that hold weights."""
    return generator.replicas if isinstance(generator, Router) else (generator,)


async def of_each(generators: Sequence[Any], work: Callable[[Any, int], Awaitable[T]]) -> list[T]:
    """``work(generator, number)`` for all of them at once, numbered from 1. Raises the first error when all have ended,
    that of a dead engine before what others raise because of it; it names the replica."""

    async def one(generator: Any, number: int) -> T:
        try:
            return await work(generator, number)
        except WhetError as error:
            if len(generators) > 1:
                error.args = (f"replica {number} of {len(generators)}: {error}",)
            raise

    jobs = [one(generator, number) for number, generator in enumerate(generators, 1)]
    answers = await asyncio.gather(*jobs, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, GeneratorError))
    return [answer for answer in answers if not isinstance(answer, BaseException)]
