"""REINFORCE++ (arXiv 2501.03262): PPO's clip without a critic; rewards are normalised over the whole step instead of
within their group. A KL penalty inside the reward is ``advantage.kl``."""

from typing import Annotated, Any

from pydantic import Field

from whet.algorithms.advantage_registry import ADVANTAGES
from whet.algorithms.grpo import GRPO
from whet.config import Component


class ReinforcePlusPlus(GRPO):
    """Reward minus the group's mean (the variant for several answers per task), whitened over the step's tokens."""

    advantage: Annotated[Any, Component(ADVANTAGES, base="whet.config:Config")] = Field(
        default={"type": "reinforce_plus_plus", "group_baseline": True}
    )
