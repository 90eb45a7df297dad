"""Names that a recipe may use for advantage estimators. Only the chosen one is imported."""

ADVANTAGES = {
    "group": "whet.algorithms.advantages:GroupAdvantage",
    "reinforce_plus_plus": "whet.algorithms.advantages:ReinforcePlusPlus",
    "gdpo": "whet.algorithms.advantages:GDPO",
    "gae": "whet.algorithms.advantages:GAE",
    "teacher": "whet.algorithms.teacher_advantage:TeacherAdvantage",
    "process_rewards": "whet.algorithms.process_rewards:ProcessRewards",
}
