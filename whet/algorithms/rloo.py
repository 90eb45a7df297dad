"""RLOO (arXiv 2402.14740): plain REINFORCE; the baseline of an answer is the mean reward of the others to its task."""

from typing import Annotated, Any

from pydantic import Field

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.grpo import GRPO
from whet.config import Component
from whet.losses.registry import LOSSES
from whet.types import Weighting


class RLOO(GRPO):
    """Leave-one-out baseline, no clip, a constant divisor: an answer's log-prob is a sum over its tokens."""

    advantage: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] = Field(
        default={"type": "group", "baseline": "leave_one_out", "divide_by_std": False}
    )
    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(
        default={"type": "policy", "surrogate": {"type": "reinforce"}}
    )
    weighting: Weighting = "constant"
