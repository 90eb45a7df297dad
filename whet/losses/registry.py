"""Names that a recipe may use for losses and their parts. Only the chosen one is imported."""

SURROGATES = {
    "ppo_clip": "whet.losses.policy_gradient:PPOClip",
    "gspo": "whet.losses.policy_gradient:GSPOClip",
    "cispo": "whet.losses.policy_gradient:CISPOClip",
    "reinforce": "whet.losses.policy_gradient:Reinforce",
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
    "forward": "whet.losses.divergences:Forward",
    "reverse": "whet.losses.divergences:Reverse",
    "mixed": "whet.losses.divergences:Mixed",
    "jsd": "whet.losses.divergences:JSD",
}

LOSSES = {
    "policy": "whet.losses.composite:PolicyLoss",
    "value": "whet.losses.value:ValueLoss",
    "sft": "whet.losses.supervised:SFTLoss",
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
