"""The names under which a recipe chooses algorithms and advantages, and the types of an algorithm's parts. Only the
chosen classes are imported."""

from typing import Annotated

from whet.algorithms.advantage import Advantage
from whet.config import Component
from whet.losses.base import LOSSES, Loss
from whet.rollouts.filters import FILTERS, Filter

ALGORITHMS = {
    "grpo": "whet.algorithms.grpo:GRPO",
    "dr_grpo": "whet.algorithms.presets:DR_GRPO",
    "dapo": "whet.algorithms.presets:DAPO",
    "gspo": "whet.algorithms.presets:GSPO",
    "cispo": "whet.algorithms.presets:CISPO",
    "rloo": "whet.algorithms.presets:RLOO",
    "reinforce_plus_plus": "whet.algorithms.presets:REINFORCE_PLUS_PLUS",
    "gdpo": "whet.algorithms.presets:GDPO",
    "max_rl": "whet.algorithms.presets:MAX_RL",
    "sapo": "whet.algorithms.presets:SAPO",
    "gmpo": "whet.algorithms.presets:GMPO",
    "dppo": "whet.algorithms.presets:DPPO",
    "m2po": "whet.algorithms.presets:M2PO",
    "clip_cov": "whet.algorithms.presets:CLIP_COV",
    "kl_cov": "whet.algorithms.presets:KL_COV",
    "ppo": "whet.algorithms.ppo:PPO",
    "prime": "whet.algorithms.prime:PRIME",
    "sft": "whet.algorithms.sft:SFT",
    "distillation": "whet.algorithms.distillation:Distillation",
    "on_policy_distillation": "whet.algorithms.distillation:OnPolicyDistillation",
    "dpo": "whet.algorithms.preference:DPO",
    "online_dpo": "whet.algorithms.preference:OnlineDPO",
    "kto": "whet.algorithms.preference:KTO",
    "reward_model": "whet.algorithms.preference:RewardModel",
}

ADVANTAGES = {
    "group": "whet.algorithms.grpo:GroupAdvantage",
    "reinforce_plus_plus": "whet.algorithms.reinforce_plus_plus:ReinforcePlusPlusAdvantage",
    "gdpo": "whet.algorithms.gdpo:GDPOAdvantage",
    "gae": "whet.algorithms.ppo:GAE",
    "teacher": "whet.algorithms.distillation:TeacherAdvantage",
    "process_rewards": "whet.algorithms.prime:ProcessRewards",
    "turn": "whet.algorithms.turns:TurnAdvantage",
    "max_rl": "whet.algorithms.max_rl:MaxRLAdvantage",
    "clip_cov": "whet.algorithms.token_selection:ClipCov",
    "kl_cov": "whet.algorithms.token_selection:KLCov",
    "m2po": "whet.algorithms.token_selection:M2PO",
}

AnyLoss = Annotated[Loss, Component(LOSSES)]
AnyAdvantage = Annotated[Advantage, Component(ADVANTAGES)]
AnyFilter = Annotated[Filter, Component(FILTERS)]
