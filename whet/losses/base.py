"""The interface of losses, and the names under which a recipe chooses them.

A loss is a frozen config that is called with a model's output and a batch. It depends on no model and on no device.
Only the chosen loss is imported.
"""

from __future__ import annotations

from typing import Literal, Protocol

from whet.base.lazy import Tensor
from whet.core.batch import Batch, ModelOutput, Output
from whet.metrics import Metrics

Unit = Literal["token", "sequence", "group"]


class Loss(Protocol):
    """``reads`` names the columns of the batch that must be filled first (``reference_logprobs``, ``advantages``, a
    column that you added), ``outputs`` the tensors requested from the model. ``unit`` is the smallest piece of a batch
    on which the loss is still additive: token losses may be split between any two sequences, group losses only between
    groups.
    """

    @property
    def reads(self) -> frozenset[str]: ...

    @property
    def outputs(self) -> frozenset[Output]: ...

    @property
    def unit(self) -> Unit: ...

    def __call__(self, output: ModelOutput, batch: Batch) -> tuple[Tensor, Metrics]: ...


SURROGATES = {
    "ppo_clip": "whet.losses.policy_gradient:PPOClip",
    "gspo": "whet.losses.policy_gradient:GSPOClip",
    "cispo": "whet.losses.policy_gradient:CISPOClip",
    "reinforce": "whet.losses.policy_gradient:Reinforce",
    "sapo": "whet.losses.trust_region:SAPOGate",
    "dppo": "whet.losses.trust_region:DPPOMask",
    "gmpo": "whet.losses.trust_region:GMPOClip",
    "kl_cov": "whet.losses.trust_region:KLCovPenalty",
}

CORRECTIONS = {
    "tis": "whet.losses.off_policy:TIS",
    "icepop": "whet.losses.off_policy:IcePop",
    "sequence_mask": "whet.losses.off_policy:SequenceMask",
}

FORMS = {
    "sigmoid": "whet.losses.dpo_forms:Sigmoid",
    "robust": "whet.losses.dpo_forms:Robust",
    "hinge": "whet.losses.dpo_forms:Hinge",
    "ipo": "whet.losses.dpo_forms:IPO",
}

DIVERGENCES = {
    "forward": "whet.losses.distillation:Forward",
    "reverse": "whet.losses.distillation:Reverse",
    "mixed": "whet.losses.distillation:Mixed",
    "jsd": "whet.losses.distillation:JSD",
}

LOSSES = {
    "policy": "whet.losses.composite:PolicyLoss",
    "value": "whet.losses.value:ValueLoss",
    "sft": "whet.losses.sft:SFTLoss",
    "dpo": "whet.losses.preference:DPOLoss",
    "simpo": "whet.losses.preference:SimPOLoss",
    "orpo": "whet.losses.preference:ORPOLoss",
    "kto": "whet.losses.preference:KTOLoss",
    "bradley_terry": "whet.losses.reward_model:BradleyTerry",
    "score_regression": "whet.losses.reward_model:ScoreRegression",
    "implicit_reward": "whet.losses.implicit_reward:ImplicitReward",
    "distillation": "whet.losses.distillation:DistillationLoss",
    "on_policy_distillation": "whet.losses.distillation:OnPolicyDistillationLoss",
}
