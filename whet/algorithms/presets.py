"""The family of GRPO as values: GRPO with other settings. A recipe names a preset and changes its settings,

    algorithm: {type: dapo, group_size: 16}

and your own preset is a value in one of your modules, named by its dotted path.
"""

from whet.algorithms.gdpo import GDPOAdvantage
from whet.algorithms.grpo import GRPO, GroupAdvantage
from whet.algorithms.max_rl import MaxRLAdvantage
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlusAdvantage
from whet.algorithms.token_selection import M2PO as M2POAdvantage
from whet.algorithms.token_selection import ClipCov, KLCov
from whet.losses.composite import PolicyLoss
from whet.losses.off_policy import TIS
from whet.losses.policy_gradient import CISPOClip, GSPOClip, PPOClip, Reinforce
from whet.losses.trust_region import DPPOMask, GMPOClip, KLCovPenalty, SAPOGate
from whet.rollouts.filters import DynamicSampling

DAPO = GRPO(
    loss=PolicyLoss(surrogate=PPOClip(clip_low=0.2, clip_high=0.28)), filters=(DynamicSampling(),), minibatches=4
)
"""DAPO (arXiv 2503.14476): more room for unlikely tokens (clip-higher), only groups with different rewards (dynamic
sampling), equal weight for every token, no KL. Its soft penalty for long answers depends on the recipe's length limit:
add ``{type: overlong_shaping, limit: ..., buffer: ...}`` to ``filters``."""

DR_GRPO = GRPO(advantage=GroupAdvantage(divide_by_std=False), weighting="constant")
"""Dr. GRPO (arXiv 2503.20783) divides neither by a group's standard deviation, which favours tasks that are too easy or
too hard, nor by an answer's length, which favours long wrong answers: the constant divisor is
``sampling.max_new_tokens``."""

GSPO = GRPO(loss=PolicyLoss(surrogate=GSPOClip(clip_low=3e-4, clip_high=4e-4)), weighting="sequence", minibatches=4)
"""GSPO (arXiv 2507.18071): ratio and clip apply to a whole answer instead of each token. Designed for
mixture-of-experts models, whose routing makes the ratios of single tokens noisy."""

CISPO = GRPO(loss=PolicyLoss(surrogate=CISPOClip()), minibatches=4)
"""CISPO (MiniMax-M1, arXiv 2506.13585) clips the weight of a token but never its gradient, so that rare tokens, which
PPO's clip removes after the first update, are still trained."""

RLOO = GRPO(
    advantage=GroupAdvantage(baseline="leave_one_out", divide_by_std=False),
    loss=PolicyLoss(surrogate=Reinforce()),
    weighting="constant",
)
"""RLOO (arXiv 2402.14740): plain REINFORCE; the baseline of an answer is the mean reward of the other answers to its
task. With a constant divisor, an answer's log-prob is a sum over its tokens."""

REINFORCE_PLUS_PLUS = GRPO(advantage=ReinforcePlusPlusAdvantage(group_baseline=True))
"""REINFORCE++ (arXiv 2501.03262): the variant for several answers per task."""

GDPO = GRPO(advantage=GDPOAdvantage())
"""GDPO (arXiv 2601.05242): list the scores of your task set in ``advantage.components``."""

MAX_RL = GRPO(advantage=MaxRLAdvantage())
"""MaxRL (arXiv 2602.02710): the division by the group's mean reward lets hard tasks count as in maximum likelihood.
Rewards must not be negative."""

SAPO = GRPO(loss=PolicyLoss(surrogate=SAPOGate()), weighting="sequence", minibatches=4)
"""SAPO (arXiv 2511.20347): a soft gate instead of a clip, so that a token's gradient fades as its ratio leaves 1."""

GMPO = GRPO(loss=PolicyLoss(surrogate=GMPOClip()), weighting="sequence", minibatches=4)
"""GMPO (arXiv 2507.20673): the geometric mean of an answer's clipped ratios, which outliers move less than the
arithmetic mean."""

DPPO = GRPO(
    advantage=GroupAdvantage(divide_by_std=False),
    loss=PolicyLoss(surrogate=DPPOMask()),
    weighting="constant",
    minibatches=4,
)
"""DPPO (arXiv 2602.04879): stops a token where its probability has moved too far from the generator's, not where its
ratio has. Advantages and weights are Dr. GRPO's, as in the authors' recipes."""

_UNBOUNDED = 1e9  # above every ratio

M2PO = GRPO(
    advantage=M2POAdvantage(),
    loss=PolicyLoss(surrogate=CISPOClip(clip_high=_UNBOUNDED), correction=TIS(cap=_UNBOUNDED)),
    minibatches=4,
)
"""M2PO (arXiv 2510.01161), for rollouts that are many steps stale: the plain importance ratio to the generator, without
the tokens whose squared log-ratios are largest."""

CLIP_COV = GRPO(advantage=ClipCov(), minibatches=4)
"""Clip-Cov (arXiv 2505.22617): a few of the tokens that reduce the entropy most are left out of each step."""

KL_COV = GRPO(advantage=KLCov(), loss=PolicyLoss(surrogate=KLCovPenalty()), minibatches=4)
"""KL-Cov (arXiv 2505.22617): the tokens that reduce the entropy most are held back by a KL penalty; nothing is
clipped."""
