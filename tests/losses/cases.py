"""Every loss with its oracle: a table for the tests of equality, gradients, additivity and extremes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.losses.batches import fill, pair_groups, random_groups, unpaired_groups
from tests.reference import distillation as distill
from tests.reference import policy as slow
from tests.reference import preference as prefer
from tests.reference.plain import Plain, PlainOutput
from whet.core.batch import Batch, ModelOutput
from whet.losses.composite import PolicyLoss
from whet.losses.distillation import JSD, DistillationLoss, Forward, Mixed, OnPolicyDistillationLoss, Reverse
from whet.losses.dpo_forms import IPO, Hinge, Robust, Sigmoid
from whet.losses.implicit_reward import ImplicitReward
from whet.losses.kl import KL
from whet.losses.policy_gradient import CISPOClip, GSPOClip, PPOClip, Reinforce
from whet.losses.preference import DPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from whet.losses.reward_model import BradleyTerry, ScoreRegression
from whet.losses.sft import SFTLoss
from whet.losses.trust_region import DPPOMask, GMPOClip, KLCovPenalty, SAPOGate
from whet.losses.value import ValueLoss

Oracle = Callable[[Plain, PlainOutput, PlainOutput], list[float]]


@dataclass(frozen=True)
class Case:
    name: str
    loss: Any
    oracle: Oracle
    data: str = "policy"
    noise: float = 0.4

    def make(self, seed: int) -> tuple[Batch, ModelOutput]:
        makers = {
            "policy": (random_groups, "token"),
            "pairs": (pair_groups, "group"),
            "rows": (unpaired_groups, "sequence"),
        }
        groups, weighting = makers[self.data]
        return fill(groups(seed), seed, weighting, self.noise)


def using(oracle: Callable[..., list[float]], **settings: Any) -> Oracle:
    return lambda b, output, frozen: oracle(b, output, frozen, **settings)


def _all_terms(b: Plain, output: PlainOutput, frozen: PlainOutput) -> list[float]:
    surrogate = slow.ppo(b, output, frozen, high=0.28)
    kl_term = slow.kl(b, output, frozen, coefficient=0.05)
    return slow.composite(b, output, frozen, surrogate, slow.tis(b, frozen, 1.05), kl_term, 0.3, 0.2, 0.5)


def _corrected(correction: Callable[..., list[float]], **settings: Any) -> Oracle:
    return lambda b, output, frozen: slow.composite(
        b, output, frozen, slow.reinforce(b, output, frozen), correction(b, frozen, **settings)
    )


def _policy(**settings: Any) -> PolicyLoss:
    return PolicyLoss.model_validate(settings)


POLICY = [
    Case("ppo", PPOClip(), using(slow.ppo)),
    Case("ppo clip-higher", PPOClip(clip_low=0.1, clip_high=0.28), using(slow.ppo, low=0.1, high=0.28)),
    Case("ppo dual clip", PPOClip(dual_clip=1.5), using(slow.ppo, dual=1.5), noise=0.8),
    Case("gspo", GSPOClip(), using(slow.gspo)),
    Case("gspo wide", GSPOClip(clip_low=0.2, clip_high=0.3), using(slow.gspo, low=0.2, high=0.3)),
    Case("cispo", CISPOClip(), using(slow.cispo), noise=1.5),
    Case("cispo tight", CISPOClip(clip_high=0.2), using(slow.cispo, high=0.2)),
    Case("reinforce", Reinforce(), using(slow.reinforce)),
    Case("sapo", SAPOGate(), using(slow.sapo), noise=0.8),
    Case("sapo steep", SAPOGate(tau_positive=3.0, tau_negative=5.0), using(slow.sapo, positive=3.0, negative=5.0)),
    Case("dppo tv", DPPOMask(), using(slow.dppo), noise=0.8),
    Case("dppo tv tight", DPPOMask(low=0.02, high=0.05, cap=1.1), using(slow.dppo, low=0.02, high=0.05, cap=1.1)),
    Case(
        "dppo kl",
        DPPOMask(divergence="kl", low=0.02, high=0.01),
        using(slow.dppo, divergence="kl", low=0.02, high=0.01),
    ),
    Case("gmpo", GMPOClip(), using(slow.gmpo), noise=0.8),
    Case("gmpo tight", GMPOClip(clip_low=0.1, clip_high=0.2), using(slow.gmpo, low=0.1, high=0.2)),
    Case("klcov", KLCovPenalty(), using(slow.kl_cov)),
    Case("klcov weak", KLCovPenalty(coefficient=0.3), using(slow.kl_cov, coefficient=0.3)),
    Case("kl k1", KL(estimator="k1"), using(slow.kl, estimator="k1")),
    Case("kl k2", KL(estimator="k2", coefficient=0.5), using(slow.kl, estimator="k2", coefficient=0.5)),
    Case("kl k3", KL(), using(slow.kl)),
    Case(
        "kl clamped", KL(log_ratio_clamp=0.6, output_clamp=0.1), using(slow.kl, log_ratio_clamp=0.6, output_clamp=0.1)
    ),
    Case(
        "kl k1 clamped",
        KL(estimator="k1", log_ratio_clamp=0.6, output_clamp=0.3),
        using(slow.kl, estimator="k1", log_ratio_clamp=0.6, output_clamp=0.3),
    ),
    Case(
        "kl k1 input clamp",
        KL(estimator="k1", log_ratio_clamp=0.3),
        using(slow.kl, estimator="k1", log_ratio_clamp=0.3),
    ),
    Case("kl unbiased", KL(unbiased_gradient=True), using(slow.kl, unbiased=True)),
    Case("policy plain", PolicyLoss(), using(slow.ppo)),
    Case("policy tis", _policy(surrogate="reinforce", correction="tis"), _corrected(slow.tis), noise=6),
    Case(
        "policy icepop",
        _policy(surrogate="reinforce", correction={"type": "icepop", "low": 0.95, "high": 1.1}),
        _corrected(slow.icepop, low=0.95, high=1.1),
    ),
    Case(
        "policy icepop defaults", _policy(surrogate="reinforce", correction="icepop"), _corrected(slow.icepop), noise=6
    ),
    Case(
        "policy sequence mask",
        _policy(surrogate="reinforce", correction="sequence_mask"),
        _corrected(slow.sequence_mask),
        noise=0.1,
    ),
    Case(
        "policy all terms",
        _policy(
            surrogate={"type": "ppo_clip", "clip_high": 0.28},
            correction={"type": "tis", "cap": 1.05},
            kl={"coefficient": 0.05},
            entropy_coefficient=0.3,
            positive_nll={"coefficient": 0.2, "threshold": 0.5},
        ),
        _all_terms,
    ),
]

PAIRS = [
    Case("dpo", DPOLoss(), using(prefer.dpo), "pairs"),
    Case("dpo conservative", DPOLoss(form=Sigmoid(label_smoothing=0.2)), using(prefer.dpo, smoothing=0.2), "pairs"),
    Case(
        "dpo robust",
        DPOLoss(form=Robust(label_smoothing=0.1), beta=0.5),
        using(prefer.dpo, form="robust", beta=0.5, smoothing=0.1),
        "pairs",
    ),
    Case("dpo hinge", DPOLoss(form=Hinge(), beta=1.5), using(prefer.dpo, form="hinge", beta=1.5), "pairs", noise=0.8),
    Case("dpo ipo", DPOLoss(form=IPO(), beta=0.3), using(prefer.dpo, form="ipo", beta=0.3), "pairs"),
    Case("dpo averaged", DPOLoss(length_average=True), using(prefer.dpo, average=True), "pairs"),
    Case("dpo with sft", DPOLoss(sft_weight=0.7), using(prefer.dpo, sft=0.7), "pairs"),
    Case("simpo", SimPOLoss(), using(prefer.simpo), "pairs"),
    Case("simpo other settings", SimPOLoss(beta=1.0, gamma=0.0), using(prefer.simpo, beta=1.0, gamma=0.0), "pairs"),
    Case("orpo", ORPOLoss(), using(prefer.orpo), "pairs"),
    Case("orpo heavy", ORPOLoss(weight=1.0), using(prefer.orpo, weight=1.0), "pairs"),
    Case("kto", KTOLoss(), using(prefer.kto), "rows"),
    Case(
        "kto unequal",
        KTOLoss(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5),
        using(prefer.kto, beta=0.5, good=1.5, bad=0.5),
        "rows",
    ),
]

HEADS = [
    Case("bradley-terry", BradleyTerry(), using(prefer.bradley_terry), "pairs"),
    Case(
        "bradley-terry with margin",
        BradleyTerry(margin="correct", centre_coefficient=0.3),
        using(prefer.bradley_terry, margin="correct", centre=0.3),
        "pairs",
    ),
    Case("score regression", ScoreRegression(), using(prefer.regression)),
    Case("implicit reward", ImplicitReward(), using(prefer.implicit_reward), "rows"),
    Case(
        "implicit reward of a score",
        ImplicitReward(beta=0.7, outcome="format"),
        using(prefer.implicit_reward, beta=0.7, outcome="format"),
    ),
    Case("value", ValueLoss(), using(prefer.value)),
    Case("value unclipped", ValueLoss(clip=None), using(prefer.value, clip=None)),
]

TEXT = [
    Case("sft", SFTLoss(), using(distill.sft)),
    Case("on-policy distillation", OnPolicyDistillationLoss(), using(distill.on_policy)),
]
TEXT.append(Case("on-policy clamped", OnPolicyDistillationLoss(clamp=0.2), using(distill.on_policy, clamp=0.2)))
for tail in ("renormalise", "bucket"):
    for form, divergence in {
        "forward": Forward(),
        "reverse": Reverse(),
        "mixed": Mixed(mix=0.3),
        "jsd": JSD(mix=0.3),
    }.items():
        TEXT.append(
            Case(
                f"distillation {form} {tail}",
                DistillationLoss(divergence=divergence, tail=tail),
                using(distill.distillation, form=form, tail=tail, mix=0.3),
            )
        )

CASES = POLICY + PAIRS + HEADS + TEXT
