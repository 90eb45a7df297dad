"""CISPO (MiniMax-M1, arXiv 2506.13585): GRPO that clips the weight of a token and never its gradient, so that rare
tokens, which PPO's clip silences after the first update, go on learning."""

from typing import Annotated, Any

from pydantic import Field

from whet.algorithms.grpo import GRPO
from whet.config import Component
from whet.losses.registry import LOSSES


class CISPO(GRPO):
    """A clipped, detached ratio times REINFORCE; token mean."""

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(
        default={"type": "policy", "surrogate": {"type": "cispo"}}
    )
    minibatches: int = Field(4, gt=0)
