"""Extensions as users write them: a loss that reads a new column, an algorithm that fills it, a preset."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from whet.algorithms.base import POLICY, OnlineAlgorithm, Role
from whet.algorithms.grpo import GRPO, GroupAdvantage
from whet.algorithms.registry import AnyLoss
from whet.core.batch import Batch, ModelOutput
from whet.core.types import Group
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics
from whet.metrics import Metrics


class Surprising(WeightedLoss):
    """REINFORCE whose advantage is a column that the algorithm fills, [S]."""

    reads: ClassVar = frozenset({"surprise"})

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        credit = batch.per_token(batch.column("surprise"))
        return -credit * at_trained(batch, output.logprobs), token_metrics(batch, {"surprise/mean": credit})


class Surprise(OnlineAlgorithm):
    """An answer earns its reward times how unlikely it was."""

    fills: ClassVar = frozenset({"surprise"})
    loss: AnyLoss = Surprising()

    @property
    def roles(self) -> dict[str, Role]:
        return {"policy": Role(loss=self.loss, fills=POLICY)}

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Any]) -> Metrics:
        unlikely = -batch.per_sequence(batch.column("rollout_logprobs")) / batch.trained_per_sequence.clamp(min=1)
        batch.fill("surprise", batch.reward * unlikely, axis="sequence")
        return await super().prepare(batch, groups, learners)


class Forgetful(Surprise):
    """Has no ``return`` in ``prepare``."""

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Any]) -> Metrics:
        await super().prepare(batch, groups, learners)
        return None  # type: ignore[return-value]


SMALL_GROUPS = GRPO(group_size=3, advantage=GroupAdvantage(divide_by_std=False), minibatches=3)
