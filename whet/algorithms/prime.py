"""PRIME (arXiv 2502.01456): each token gets its own reward, from a reward model that is trained during the run and only
on the outcomes of whole answers. A second language model separates right from wrong answers by its log-ratio to its
frozen initial weights; token by token, that log-ratio is the process reward.

    r_t = beta (lp_reward - lp_initial)                                           of token t
    A_t = sum over s >= t of gamma^(s - t) (r_s - mean of the others' r) + R - mean of the others' R
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.algorithms.advantage import Advantage, Credit, Steps, finite_rewards, group_centred, group_sums
from whet.algorithms.base import POLICY, OnlineAlgorithm, Role
from whet.algorithms.registry import AnyAdvantage, AnyFilter, AnyLoss
from whet.base.errors import ConfigError
from whet.base.lazy import torch
from whet.core.batch import Batch
from whet.core.types import Weighting
from whet.losses.composite import PolicyLoss
from whet.losses.implicit_reward import ImplicitReward
from whet.models.config import LoraSettings, ModelConfig
from whet.rollouts.filters import PassRate


class ProcessRewards(Advantage):
    """sum over s >= t of gamma^(s - t) (r_s - b) + outcome reward - mean of the others' (arXiv 2502.01456, eq. 5).

    r_s = beta (lp of the reward model - lp of its frozen initial weights) is the process reward of token s, and b the
    mean over the group's other answers of their mean r. An answer without trained tokens has no process rewards and is
    not part of b; an answer without others to compare with has a process part of 0. A group of one has advantage 0.
    """

    beta: float = Field(0.05, ge=0)
    """The value of one nat of log-ratio, where a right outcome has value 1; 0: RLOO."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later tokens' process rewards. The outcome is not discounted."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"reward_logprobs", "reward_reference_logprobs"})

    @property
    def compares(self) -> bool:
        return True

    def estimate(self, batch: Batch) -> Credit:
        """Raises DataError for a reward that isn't finite."""
        outcome_S, members_S = group_centred(batch, finite_rewards(batch, batch.reward))
        outcome_S = outcome_S * members_S / (members_S - 1).clamp(min=1)
        start_N = batch.column("reward_reference_logprobs")
        process_N = self.beta * (batch.column("reward_logprobs").double() - start_N)

        tokens_S = batch.per_episode(batch.trained_per_sequence)
        mean_S = batch.per_episode(batch.per_sequence(process_N)) / tokens_S.clamp(min=1)
        rated_S = (tokens_S > 0).double()
        others_S = group_sums(batch, rated_S) - rated_S
        baseline_S = (group_sums(batch, mean_S) - mean_S) / others_S.clamp(min=1)
        steps = Steps(batch)
        gamma_S = torch.full_like(outcome_S, self.gamma)
        to_go_TS = steps.scan(steps.of(process_N - batch.per_token(baseline_S)), gamma_S)
        return Credit(steps.tokens(to_go_TS * (others_S > 0) + outcome_S))


class RewardStart(ModelConfig):
    """The initial weights of the implicit reward model."""

    lora: LoraSettings | Literal[False] | None = None  # type: ignore[assignment]
    """By default the policy's LoRA settings, if it has any; false: full weights."""


class PRIME(OnlineAlgorithm):
    """A policy and an implicit reward model. The process rewards of a step are computed before either is trained."""

    group_size: int = Field(8, gt=1)
    """Answers per task."""
    advantage: AnyAdvantage = ProcessRewards()
    """The estimator that turns rewards into advantages."""
    loss: AnyLoss = PolicyLoss()
    """The loss of the policy."""
    reward_loss: AnyLoss = ImplicitReward()
    """The loss of the reward model."""
    reward_model: RewardStart | None = None
    """The initial weights of the reward model, which uses the policy's tokenizer; by default the policy's."""
    reward_lr: float | None = Field(None, ge=0)
    """The reward model's learning rate; by default the policy's."""
    filters: tuple[AnyFilter, ...] = (PassRate(),)
    """Filters that are applied to groups between grading and training."""
    weighting: Weighting = "sequence"
    """A token's share of a step."""

    @property
    def roles(self) -> dict[str, Role]:
        start = self.reward_model
        reward = Role(
            loss=self.reward_loss,
            key="reward_loss",
            fills={"reward_logprobs": "logprobs", "reward_reference_logprobs": "reference_logprobs"},
            model=start and ModelConfig(**start.model_dump(exclude={"lora"}), lora=start.lora or None),
            inherits_lora=start is not None and start.lora is None,
            lr=self.reward_lr,
        )
        return {"policy": Role(loss=self.loss, fills=POLICY), "implicit_reward": reward}

    @property
    def estimator(self) -> Advantage:
        return self.advantage

    def check_models(self, model: ModelConfig) -> None:
        from whet.distillation.vocabulary import same_tokens

        start = self.reward_model
        if start is not None and not same_tokens(model, start):
            raise ConfigError(
                f"algorithm.reward_model = {start.path} has another tokenizer than the policy, {model.path}; the "
                "reward model scores the policy's tokens, so choose a model with the same tokenizer"
            )
