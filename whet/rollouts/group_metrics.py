"""Statistics of a group: its pass rate and its metrics before filters."""

import statistics

from whet.core.types import Group, Status
from whet.metrics import Metrics


def pass_rate(group: Group, threshold: float) -> float:
    """Return the share of answers whose score ``correct`` is above ``threshold``; the reward, if there is no such
    score. Filters and curricula use it as a task's difficulty."""
    right = [t.scores.get("correct", t.reward) > threshold for t in group.episodes]
    return sum(right) / len(right)


def count_group(metrics: Metrics, group: Group, mode: str, version: int) -> None:
    """Add the rewards, scores and lengths of a group. ``mode`` names its thinking mode, if it has one; ``version`` is
    the current version of the weights."""
    for role, rewards in group.rewards_by_role.items():
        metrics.mean("reward/std", statistics.pstdev(rewards))
        if role:
            metrics.mean(f"role/{role}/reward", sum(rewards), len(rewards))
    for episode in group.episodes:
        metrics.mean("reward/mean", episode.reward)
        metrics.min("reward/min", episode.reward).max("reward/max", episode.reward)
        if mode:
            metrics.mean(f"thinking/{mode}/reward", episode.reward)
            metrics.mean(f"thinking/{mode}/length", episode.trained_tokens)
            metrics.mean(f"thinking/{mode}/cut", episode.usage.cut_thoughts > 0)
        for name, value in episode.scores.items():
            metrics.mean("accuracy" if name == "correct" else f"scores/{name}", value)
        metrics.mean("answer/length_mean", episode.trained_tokens)
        metrics.mean("answer/truncated", float(episode.status is Status.TRUNCATED))
        metrics.sum("answer/tokens", episode.trained_tokens)
        metrics.mean("episode/turns", episode.usage.turns)
        metrics.mean("episode/branches", len(episode.branches)).max("episode/branches_max", len(episode.branches))
        if episode.limit is not None:
            metrics.sum(f"episode/cut/{episode.limit}", 1)
        oldest = min((span.versions[0] for span in episode.spans if span.versions), default=version)
        metrics.max("staleness/max", version - oldest)
