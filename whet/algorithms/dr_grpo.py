"""Dr. GRPO (arXiv 2503.20783): GRPO that divides neither by a group's spread, which favours tasks that are too easy or
too hard, nor by an answer's length, which favours long wrong answers."""

from typing import Annotated, Any

from pydantic import Field

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.grpo import GRPO
from whet.config import Component
from whet.types import Weighting


class DrGRPO(GRPO):
    """Centred rewards, and a constant divisor: ``sampling.max_new_tokens``."""

    advantage: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] = Field(
        default={"type": "group", "divide_by_std": False}
    )
    weighting: Weighting = "constant"
