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
    "sft": "whet.algorithms.sft:SFT",
    "dpo": "whet.algorithms.dpo:DPO",
    "kto": "whet.algorithms.kto:KTO",
    "reward_model": "whet.algorithms.reward_model:RewardModel",
}
