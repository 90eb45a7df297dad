"""The interface of weight syncs, which bring the weights of a learner to a generator.

in this process    learner ──tensor by tensor──► the generator's model                           (in_process)
to an engine       learner's ranks ──sender──► buckets ──transport──► receiver ──► engine's ranks    (engine)
                                               shared memory, disk, collective, CUDA IPC
then, either way   all tensors or digests equal ──► log-probs of a few tokens equal ──► sampling continues
"""

from typing import Any, Protocol

from whet.cluster.lease import Devices
from whet.engines.base import Engine
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.weights.source import NamedTensors

SEPARATE_DEVICES = Devices({}, shared=False)


class WeightSync(Protocol):
    """Brings weights to a generator, or to all its replicas at once. Their arrival is verified before anything that was
    sampled is trained on."""

    async def publish(self, learner: Learner, generator: Engine[Any], version: int) -> Metrics:
        """Return once the generator samples from the learner's weights. Raises ``RefitError``, naming the tensors that
        differ."""
        ...

    async def load(self, weights: NamedTensors, generator: Engine[Any], version: int) -> Metrics:
        """Publish weights of this process; without a learner there is no probe."""
        ...
