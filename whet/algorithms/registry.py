"""Names that a recipe may use for algorithms and advantages. Only the chosen one is imported."""

ALGORITHMS = {
    "grpo": "whet.algorithms.grpo:GRPO",
    "dr_grpo": "whet.algorithms.presets:DR_GRPO",
    "dapo": "whet.algorithms.presets:DAPO",
    "gspo": "whet.algorithms.presets:GSPO",
    "cispo": "whet.algorithms.presets:CISPO",
    "rloo": "whet.algorithms.presets:RLOO",
    "reinforce_plus_plus": "whet.algorithms.presets:REINFORCE_PLUS_PLUS",
    "gdpo": "whet.algorithms.presets:GDPO",
    "ppo": "whet.algorithms.ppo:PPO",
    "prime": "whet.algorithms.prime:PRIME",
    "sft": "whet.algorithms.sft:SFT",
    "distillation": "whet.algorithms.distillation:Distillation",
    "on_policy_distillation": "whet.algorithms.distillation:OnPolicyDistillation",
    "dpo": "whet.algorithms.dpo:DPO",
    "online_dpo": "whet.algorithms.online_dpo:OnlineDPO",
    "kto": "whet.algorithms.kto:KTO",
    "reward_model": "whet.algorithms.reward_model:RewardModel",
}

ADVANTAGES = {
    "group": "whet.algorithms.grpo:GroupAdvantage",
    "reinforce_plus_plus": "whet.algorithms.reinforce_plus_plus:ReinforcePlusPlusAdvantage",
    "gdpo": "whet.algorithms.gdpo:GDPOAdvantage",
    "gae": "whet.algorithms.ppo:GAE",
    "teacher": "whet.algorithms.distillation:TeacherAdvantage",
    "process_rewards": "whet.algorithms.prime:ProcessRewards",
    "turn": "whet.algorithms.turns:TurnAdvantage",
}
