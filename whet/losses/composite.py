"""The policy loss of reinforcement learning: a surrogate objective and the terms that a recipe adds to it.

    loss: {type: policy, surrogate: {type: ppo_clip, clip_high: 0.28}, correction: {type: tis}, kl: {coefficient: 0.01}}

All terms are sums over the same weighted tokens, so their sum is as additive as they are.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from whet.base.lazy import Tensor, torch
from whet.config import Component, Config
from whet.core.batch import Batch, ModelOutput, Output
from whet.losses.base import CORRECTIONS, SURROGATES, Unit
from whet.losses.kl import KL
from whet.losses.off_policy import Correction, mismatch
from whet.losses.policy_gradient import PolicyGradient, PPOClip
from whet.losses.tensors import bounded_exp, old_logprobs
from whet.losses.weighted import WeightedLoss, at_trained, token_metrics, weighted_means
from whet.metrics import Metrics


class PositiveNLL(Config):
    """coefficient x -lp on the tokens of sequences whose reward is above ``threshold`` (VAPO, arXiv 2504.05118)."""

    coefficient: float = Field(0.1, ge=0)
    threshold: float = 0.0


class PolicyLoss(WeightedLoss):
    """surrogate x correction + KL - entropy bonus + positive NLL. Each term is reported under ``loss/``."""

    surrogate: Annotated[PolicyGradient, Component(SURROGATES)] = PPOClip()
    correction: Annotated[Correction, Component(CORRECTIONS)] | None = None
    """Multiplies the surrogate only. A recipe with ``rollouts.max_staleness`` above 0 uses ``tis`` by default;
    ``null`` turns it off."""
    kl: KL | None = None
    entropy_coefficient: float = Field(0.0, ge=0)
    positive_nll: PositiveNLL | None = None

    @model_validator(mode="after")
    def _corrects_once(self) -> Self:
        if self.correction is not None and not self.surrogate.takes_correction:
            name = Component(SURROGATES).name_of(type(self.surrogate))
            raise ValueError(f"surrogate = {name} already contains the importance ratio; set correction to null")
        return self

    @property
    def reads(self) -> frozenset[str]:
        names = self.surrogate.reads
        if self.correction is not None:
            names |= {"rollout_logprobs"}
        return names if self.kl is None else names | self.kl.reads

    @property
    def outputs(self) -> frozenset[Output]:
        return self.surrogate.outputs | ({"entropy"} if self.entropy_coefficient else set())

    @property
    def unit(self) -> Unit:
        """The coarsest unit of its parts."""
        parts = [self.surrogate.unit] if self.correction is None else [self.surrogate.unit, self.correction.unit]
        return "sequence" if "sequence" in parts else "token"

    def zero_gradient(self, batch: Batch) -> Tensor:
        """A token of advantage 0 contributes no gradient, unless a KL or entropy term trains it too. A KL term with a
        coefficient of 0 still measures every token, so every sequence is computed then."""
        if self.kl is not None or self.entropy_coefficient:
            return super().zero_gradient(batch)
        zero = self.surrogate.zero_gradient(batch)
        if self.positive_nll is not None and self.positive_nll.coefficient:
            zero &= batch.reward <= self.positive_nll.threshold
        return zero

    def per_token(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]:
        surrogate, metrics = self.surrogate.per_token(output, batch)
        if self.correction is not None:
            surrogate, corrected = self._corrected(self.correction, surrogate, output, batch)
            metrics.merge(corrected)
        terms = {"surrogate": surrogate}
        if self.kl is not None:
            terms["kl"], _ = self.kl.per_token(output, batch)
        if self.entropy_coefficient:
            terms["entropy"] = -self.entropy_coefficient * at_trained(batch, output.column("entropy"))
        if self.positive_nll is not None:
            positive = batch.per_token((batch.reward > self.positive_nll.threshold).double())
            terms["positive_nll"] = -self.positive_nll.coefficient * positive * at_trained(batch, output.logprobs)

        metrics.merge(weighted_means(batch.column("weight"), {f"loss/{name}": term for name, term in terms.items()}))
        return sum(terms.values(), torch.zeros_like(surrogate)), metrics

    def _corrected(
        self, correction: Correction, surrogate: Tensor, output: ModelOutput, batch: Batch
    ) -> tuple[Tensor, Metrics]:
        rollout = batch.column("rollout_logprobs")
        difference = mismatch(old_logprobs(output, batch), rollout, batch)
        weight = correction(difference, batch)
        means = {"correction/weight": weight, "correction/changed": weight != bounded_exp(difference)}
        return surrogate * weight, token_metrics(batch, means)
