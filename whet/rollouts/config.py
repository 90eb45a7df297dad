"""How rollouts are made: how many, how far ahead, in which order, and what happens when some fail."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from whet.config import Component, Config
from whet.rollouts.curriculum import CURRICULA, Curriculum


class RolloutConfig(Config):
    """How many rollouts make a step, and how far they may run ahead."""

    prompts_per_step: int = Field(8, gt=0)
    """Groups that one step learns from."""
    curriculum: Annotated[Curriculum, Component(CURRICULA)] | None = None
    """Which task comes next; None: all of them in turn, shuffled anew each epoch."""
    max_staleness: int = Field(0, ge=0)
    """How many weight versions behind a rollout may have started. 0: synchronous; 1: one step off; n: n steps off."""
    order: Literal["oldest", "ready"] = "oldest"
    """Which groups a step takes when some run ahead: those that were started first, or the first that are complete, as
    far as the others can still be in time for ``max_staleness``."""
    partial: bool = False
    """Sample only while the loop waits for groups, as in step. What is not finished then goes on with the next step,
    under newer weights; ``max_staleness`` bounds for how long."""
    concurrency: int = Field(256, gt=0, le=100_000)
    """Episodes that run at once."""
    deadline: float = Field(600.0, gt=0)
    """Seconds that one group may take before the run stops."""
    retries: int = Field(2, ge=0)
    """How often an episode is run again after its environment or generator failed."""
    retry_delay: float = Field(1.0, ge=0)
    """Seconds before the first of them, twice as many before each further one, each time multiplied by 0.5 to 1.5."""
    episode_deadline: float | None = Field(None, gt=0)
    """Seconds that one attempt at an episode may take; past it, the attempt has failed. What an environment or the
    generator says later is thrown away."""
    max_failed: float = Field(0.1, ge=0, le=1)
    """Share of a step's groups that may be lost to failures before the run stops."""
    max_sampling_rounds: int = Field(4, gt=0)
    """At most this many times ``prompts_per_step`` groups are sampled for one step when filters drop some."""
    when_exhausted: Literal["error", "smaller_step"] = "error"
    """When ``max_sampling_rounds`` is reached: stop the run, or learn from the groups there are, if any."""
    mismatch_alarm: float = Field(1.05, gt=1)
    """Above this mean of exp|lp_learner - lp_generator| over a step's tokens the log warns."""
    max_mismatch: float | None = Field(None, gt=1)
    """Above it the run stops; None: it goes on."""
    router_replay: bool = False
    """Mixtures of experts: the policy learns with the experts that the generator's routers chose (R3, arXiv
    2510.11370), weighed by its own. For Qwen3-MoE, Mixtral and DeepSeek-V3, sampled by ``generator=torch``."""
    record_every: int = Field(1, ge=0)
    """Steps between those whose rollouts are written to the run folder; 0: none."""
    keep_groups: bool = False
    """Keep all that each step learned from in the run folder, for ``replay``."""
    replay: str | None = None
    """Folder of a run that kept its groups: learn from them again, step by step, and sample nothing."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name, asked in (("order = ready", self.order == "ready"), ("partial = true", self.partial)):
            if asked and not self.max_staleness:
                raise ValueError(
                    f"rollouts.{name} needs rollouts.max_staleness > 0: in step, every group of a step is waited for"
                )
        return self
