"""GSPO (arXiv 2507.18071): GRPO whose ratio and clip belong to a whole answer instead of each token. Made for
mixture-of-experts models, whose routing makes the ratios of single tokens noisy."""

from typing import Annotated, Any

from pydantic import Field

from whet.algorithms.grpo import GRPO
from whet.config import Component
from whet.losses.registry import LOSSES
from whet.types import Weighting


class GSPO(GRPO):
    """One ratio per answer, sequence mean."""

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(
        default={"type": "policy", "surrogate": {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}}
    )
    weighting: Weighting = "sequence"
    minibatches: int = Field(4, gt=0)
