"""How many of a group's answers are right: what filters and curricula mean by the difficulty of a task."""

from whet.core.types import Group


def pass_rate(group: Group, threshold: float) -> float:
    """Share of the answers whose score ``correct`` is above ``threshold``; where the task set gives no such score, the
    reward stands for it."""
    right = [t.scores.get("correct", t.reward) > threshold for t in group.episodes]
    return sum(right) / len(right)
