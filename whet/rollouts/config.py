"""The settings of rollouts: how many, how far ahead, in which order, and the handling of failures."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from whet.config import Component, Config
from whet.rollouts.curriculum import CURRICULA, Curriculum


class RolloutConfig(Config):
    """Settings of how rollouts are made."""

    prompts_per_step: int = Field(8, gt=0)
    """Groups per training step."""
    curriculum: Annotated[Curriculum, Component(CURRICULA)] | None = None
    """The order of tasks; None: all tasks in turn, shuffled in each epoch."""
    max_staleness: int = Field(0, ge=0)
    """Maximum age of a rollout in weight versions. 0: synchronous; n: sampling runs up to n steps ahead."""
    order: Literal["oldest", "ready"] = "oldest"
    """The groups that a step takes when sampling runs ahead: the oldest, or (``ready``) the first that are complete, as
    long as the remaining groups can still meet ``max_staleness``."""
    partial: bool = False
    """Sample only while the loop waits for groups. Unfinished episodes continue in the next step, under newer weights;
    ``max_staleness`` limits for how long."""
    concurrency: int = Field(256, gt=0, le=100_000)
    """Maximum number of episodes in flight."""
    deadline: float = Field(600.0, gt=0)
    """Seconds without progress after which the run stops: no episode had a reply or ended. A slow machine meets it only
    where a single reply, or grading it, takes that long."""
    retries: int = Field(2, ge=0)
    """Number of times that an episode is run again after its environment or generator failed."""
    retry_delay: float = Field(1.0, ge=0)
    """Seconds before the first retry, doubled for each further one, each time multiplied by 0.5 to 1.5."""
    episode_deadline: float | None = Field(None, gt=0)
    """Seconds that one attempt at an episode may take; after that the attempt has failed, and its results are
    discarded."""
    max_failed: float = Field(0.1, ge=0, le=1)
    """Share of a step's groups that may be lost to failures before the run stops."""
    max_sampling_rounds: int = Field(4, gt=0)
    """At most this many times ``prompts_per_step`` groups are sampled for one step if filters drop some."""
    when_exhausted: Literal["error", "smaller_step"] = "error"
    """When ``max_sampling_rounds`` is reached: stop the run, or train on the groups that were kept, if any."""
    mismatch_alarm: float = Field(1.05, gt=1)
    """The log warns if the mean of exp|lp_learner - lp_generator| over a step's tokens is above this."""
    max_mismatch: float | None = Field(None, gt=1)
    """The run stops if that mean is above this; None: it doesn't stop."""
    router_replay: bool = False
    """Mixtures of experts: the policy is trained with the experts that the generator's routers chose (R3, arXiv
    2510.11370), weighted by the policy's own routers. For Qwen3-MoE, Mixtral and DeepSeek-V3, sampled by
    ``generator=torch``."""
    record_every: int = Field(1, ge=0)
    """Record the rollouts of every n-th step in the run folder; 0: of none."""
    keep_groups: bool = False
    """Keep the groups of each step in the run folder, for ``replay``."""
    replay: str | None = None
    """Folder of a run that kept its groups: train on them again, step by step, without sampling."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name, is_set in (("order = ready", self.order == "ready"), ("partial = true", self.partial)):
            if is_set and not self.max_staleness:
                raise ValueError(
                    f"rollouts.{name} needs rollouts.max_staleness > 0: synchronous training waits for all groups"
                )
        return self
