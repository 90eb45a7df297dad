"""Selections of tokens over a whole step, each a wrapper around the advantage ``of`` the answers. The selection depends
on statistics of the step, so it is made once, from the log-probs at the start of the step, before the step is split:
the gradient doesn't depend on the split. In a step of several updates the papers select again at each update.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

from pydantic import Field, model_validator

from whet.algorithms.advantage import Advantage, Credit
from whet.algorithms.grpo import GroupAdvantage
from whet.algorithms.registry import AnyAdvantage
from whet.base.lazy import Tensor, torch
from whet.base.seeds import derive_seed
from whet.core.batch import Batch
from whet.losses.off_policy import mismatch
from whet.losses.weighted import at_trained


class TokenSelection(Advantage):
    """Base: the advantages ``of`` another estimator, 0 at the selected tokens, which so train nothing."""

    of: AnyAdvantage = GroupAdvantage()
    """The estimator whose advantages are used."""

    @property
    def reads(self) -> frozenset[str]:
        return self.of.reads | {"old_logprobs"}

    @property
    def fills(self) -> frozenset[str]:
        return self.of.fills

    @property
    def compares(self) -> bool:
        return self.of.compares

    @abstractmethod
    def selected(self, batch: Batch, advantages: Tensor) -> Tensor:
        """Return the mask of the selected tokens. [N] -> [N]"""

    def estimate(self, batch: Batch) -> Credit:
        """Raises DataError as ``of`` does."""
        credit = self.of.credit(batch)
        advantages_N = credit.per_token(batch)
        return Credit(advantages_N.masked_fill(self.selected(batch, advantages_N), 0.0), credit.returns)


class ClipCov(TokenSelection):
    """Select at random a ``share`` of the step's tokens, from the tokens whose covariance of log-prob and advantage is
    between ``low`` and ``high`` (Clip-Cov, arXiv 2505.22617): these reduce the entropy most."""

    share: float = Field(2e-4, gt=0, le=1)
    """The number of selected tokens, as a share of the trained ones; at least one token."""
    low: float = 1.0
    high: float = 5.0
    seed: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be below high, or no token lies between them")
        return self

    def selected(self, batch: Batch, advantages: Tensor) -> Tensor:
        tokens = batch.trained_tokens
        covariance = covariances(batch, advantages)[tokens]
        candidates = tokens[(covariance > self.low) & (covariance < self.high)]
        seed = derive_seed("clip_cov", self.seed, *batch.group_uids)  # another one in each step
        order = torch.randperm(candidates.numel(), generator=torch.Generator().manual_seed(seed))
        return _mask(batch, candidates[order[: _count(batch, self.share)]])


class KLCov(TokenSelection):
    """Mark the ``share`` of the step's tokens with the largest covariance of log-prob and advantage in the column
    ``high_covariance``, for the surrogate ``kl_cov`` (KL-Cov, arXiv 2505.22617). Advantages don't change."""

    share: float = Field(2e-4, gt=0, le=1)
    """The number of marked tokens, as a share of the trained ones; at least one token."""

    @property
    def fills(self) -> frozenset[str]:
        return self.of.fills | {"high_covariance"}

    def selected(self, batch: Batch, advantages: Tensor) -> Tensor:
        covariance = covariances(batch, advantages)[batch.trained_tokens]
        largest = covariance.argsort(descending=True, stable=True)[: _count(batch, self.share)]
        return _mask(batch, batch.trained_tokens[largest])

    def estimate(self, batch: Batch) -> Credit:
        """Also fill ``high_covariance``. Raises DataError as ``of`` does."""
        credit = self.of.credit(batch)
        batch.fill("high_covariance", self.selected(batch, credit.per_token(batch)))
        return credit


class M2PO(TokenSelection):
    """Select the tokens with the largest d^2 until the mean of d^2 over the others is at most ``threshold``; d = lp_old
    - lp_gen (M2PO, arXiv 2510.01161). Only tokens that PPO would clip count: A > 0 and d > 0, or A < 0 and d < 0."""

    threshold: float = Field(0.04, gt=0)

    @property
    def reads(self) -> frozenset[str]:
        return super().reads | {"rollout_logprobs"}

    def selected(self, batch: Batch, advantages: Tensor) -> Tensor:
        d = mismatch(batch.column("old_logprobs"), batch.column("rollout_logprobs"), batch).double()
        bounded = (batch.trained & (advantages * d > 0)).nonzero().squeeze(1)
        squares, order = d[bounded].square().sort(stable=True)
        means = squares.cumsum(0) / torch.arange(1, squares.numel() + 1)
        return _mask(batch, bounded[order[means > self.threshold]])


def covariances(batch: Batch, advantages: Tensor) -> Tensor:
    """Return (lp_old - mean of lp_old) (A - mean of A), with means over the trained tokens; 0 elsewhere. [N] -> [N]"""
    count = max(1, batch.trained_tokens.numel())
    centred = []
    for column in (batch.column("old_logprobs"), advantages):
        column = at_trained(batch, column).double()
        centred.append(column - column.sum() / count)
    return at_trained(batch, centred[0] * centred[1])


def _count(batch: Batch, share: float) -> int:
    return max(1, int(round(share * batch.trained_tokens.numel(), 6)))  # 0.29 * 100 is a little less than 29


def _mask(batch: Batch, tokens: Tensor) -> Tensor:
    mask = torch.zeros_like(batch.trained)
    mask[tokens] = True
    return mask
