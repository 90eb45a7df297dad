"""GDPO (arXiv 2601.05242), for several rewards: each is normalised within its group before they are added, so that no
reward dominates the others. The components are scores of the task set; list yours in ``advantage.components``."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from whet.algorithms.advantage import (
    Advantage,
    Credit,
    Std,
    divided,
    finite_rewards,
    group_centred,
    group_std,
    whitened_episodes,
)
from whet.base.lazy import torch
from whet.core.batch import Batch


class GDPOAdvantage(Advantage):
    """Each reward component normalised within its group, weighted, summed, then whitened over the episodes of the
    step."""

    components: dict[str, float] = Field({})
    """Name of a score -> weight. Empty: ``correct`` alone."""
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def compares(self) -> bool:
        return True

    @property
    def weights(self) -> Mapping[str, float]:
        """The components, by name of a score. Their default is not in the field, where a recipe's would be added."""
        return self.components or {"correct": 1.0}

    def estimate(self, batch: Batch) -> Credit:
        """Raises DataError for a component that is missing or not finite."""
        total_S = torch.zeros_like(batch.reward, dtype=torch.float64)
        for name, weight in self.weights.items():
            scores_S = finite_rewards(batch, batch.score(name), f"reward component {name!r}")
            centred_S, members_S = group_centred(batch, scores_S)
            spread_S = group_std(batch, centred_S, members_S, self.std) + self.eps
            total_S = total_S + weight * divided(centred_S, spread_S)
        return Credit(whitened_episodes(batch, total_S, self.std, self.eps), axis="sequence")
