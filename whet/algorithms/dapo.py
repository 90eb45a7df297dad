"""DAPO (arXiv 2503.14476): GRPO with room for unlikely tokens (clip-higher), groups that teach something (dynamic
sampling), and every token weighing the same. Its soft punishment of long answers depends on the recipe's length
limit: add ``{type: overlong_shaping, limit: ..., buffer: ...}`` to ``filters``."""

from typing import Annotated, Any

from pydantic import Field

from whet.algorithms.grpo import GRPO
from whet.config import Component
from whet.losses.registry import LOSSES
from whet.rollouts.filters import FILTERS, Filter


class DAPO(GRPO):
    """Clip-higher, dynamic sampling, token mean, no KL."""

    loss: Annotated[Any, Component(LOSSES, base="whet.config:Config")] = Field(
        default={"type": "policy", "surrogate": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}}
    )
    filters: tuple[Annotated[Filter, Component(FILTERS)], ...] = Field(default=("dynamic_sampling",))  # type: ignore[arg-type]
    minibatches: int = Field(4, gt=0)
