"""Built-in algorithms by the name that recipes use."""

ALGORITHMS = {
    "grpo": "whet.algorithms.grpo:GRPO",
    "dr_grpo": "whet.algorithms.dr_grpo:DrGRPO",
    "dapo": "whet.algorithms.dapo:DAPO",
    "gspo": "whet.algorithms.gspo:GSPO",
    "cispo": "whet.algorithms.cispo:CISPO",
    "rloo": "whet.algorithms.rloo:RLOO",
    "reinforce_plus_plus": "whet.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "gdpo": "whet.algorithms.gdpo:GDPO",
    "ppo": "whet.algorithms.ppo:PPO",
    "prime": "whet.algorithms.prime:PRIME",
    "sft": "whet.algorithms.sft:SFT",
    "distillation": "whet.algorithms.distillation:Distillation",
    "on_policy_distillation": "whet.algorithms.on_policy_distillation:OnPolicyDistillation",
    "dpo": "whet.algorithms.dpo:DPO",
    "online_dpo": "whet.algorithms.online_dpo:OnlineDPO",
    "reward_model": "whet.algorithms.reward_model:RewardModel",
}
