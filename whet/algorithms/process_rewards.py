"""From outcomes and an implicit reward model to the advantages of tokens: PRIME's estimator (arXiv 2502.01456)."""

from __future__ import annotations

from pydantic import Field

from whet.algorithms.advantages import Steps, finite_rewards, group_centred, group_sums
from whet.algorithms.credit import Credit
from whet.batch import Batch
from whet.config import Config
from whet.lazy import torch
from whet.losses.weighted import mean_per_sequence


class ProcessRewards(Config):
    """sum over s >= t of gamma^(s - t) (r_s - b) + outcome reward - mean of the others' (arXiv 2502.01456, eq. 5).

    r_s = beta (lp of the reward model - lp of its frozen start) is the process reward of token s, and b the mean over
    the group's other answers of their mean r. An answer that trains nothing has no process rewards and is not among
    them; an answer with nobody to compare it with gets nothing for its process. A group of one has advantage 0.
    """

    beta: float = Field(0.05, ge=0)
    """What a nat of log-ratio is worth beside an outcome reward of 1; 0: RLOO."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later tokens' process rewards. The outcome is not discounted."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"reward_logprobs", "reward_reference_logprobs"})

    def __call__(self, batch: Batch) -> Credit:
        """Raises DataError for a reward that isn't finite."""
        outcome, members = group_centred(batch, finite_rewards(batch, batch.reward, "reward"))
        outcome = outcome * members / (members - 1).clamp(min=1)
        start = batch.column("reward_reference_logprobs")
        process = self.beta * (batch.column("reward_logprobs").double() - start)

        mean, rated = mean_per_sequence(batch, process), (batch.trained_per_sequence > 0).double()
        others = group_sums(batch, rated) - rated
        baseline = (group_sums(batch, mean) - mean) / others.clamp(min=1)
        steps = Steps(batch)
        to_go = steps.scan(steps.of(process - batch.per_token(baseline)), torch.full_like(outcome, self.gamma))
        return Credit(steps.tokens(to_go * (others > 0) + outcome))
