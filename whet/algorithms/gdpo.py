"""GDPO (arXiv 2601.05242): for several rewards at once. Each is normalised within its group before they are added, so
that none drowns the others. The components are scores of the task set: list yours in ``advantage.components``."""

from typing import Annotated, Any

from pydantic import Field

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.grpo import GRPO
from whet.config import Component


class GDPO(GRPO):
    """Rewards normalised one by one, then over the step; token mean."""

    advantage: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] = Field(
        default={"type": "gdpo", "components": {"correct": 1.0}}
    )
