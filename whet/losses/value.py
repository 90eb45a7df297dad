"""The critic's loss: regression on returns."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from whet.base.lazy import Tensor, torch
from whet.core.batch import Batch, ModelOutput
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics
from whet.metrics import Metrics


class ValueLoss(WeightedLoss):
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) (PPO's clipped value loss)."""

    outputs: ClassVar = frozenset({"values"})

    clip: float | None = Field(0.2, gt=0)
    """c; None: no clip."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"returns"} if self.clip is None else {"returns", "values"})

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        values = at_trained(batch, output.column("values"))
        returns = at_trained(batch, batch.column("returns"))
        error = (values - returns).square()
        means = {"value/mean": values, "value/return": returns, "value/squared_error": error}
        if self.clip is not None:
            old = at_trained(batch, batch.column("values"))
            near = torch.minimum(torch.maximum(values, old - self.clip), old + self.clip)
            clipped = (near - returns).square()
            means["value/clipped"] = clipped > error
            error = torch.maximum(error, clipped)
        return 0.5 * error, token_metrics(batch, means)


def explained_variance(values: Tensor, returns: Tensor, batch: Batch) -> Metrics:
    """Return ``value/explained_variance``: 1 - Var(R - V) / Var(R) over the trained tokens of a whole step, which is 1
    for a perfect critic and 0 for a constant one. It isn't additive, so it is computed per step and not by the loss.
    [N], [N]"""
    values, returns = values[batch.trained], returns[batch.trained]
    if returns.numel() < 2 or returns.max() == returns.min():
        return Metrics()
    explained = 1 - (returns - values).var() / returns.var()
    return Metrics().mean("value/explained_variance", explained.item())
