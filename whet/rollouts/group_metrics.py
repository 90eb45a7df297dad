"""Statistics of a group: its pass rate and its metrics before filters; and the metrics of each environment of a blend,
with a warning if the reward of one falls while the mean over all rises."""

import logging
import math
import statistics
from collections.abc import Iterable, Sequence

from whet.core.types import Group, Status
from whet.metrics import Metrics

log = logging.getLogger(__name__)

_WINDOW = 10  # steps, compared with the same number of steps before them
_SURE = 3.0  # standard errors of the difference


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


class ByEnvironment:
    """The metrics of each environment in the current step, and their mean rewards in the steps before."""

    def __init__(self, names: Iterable[str]) -> None:
        self.history: dict[str, list[float]] = {name: [] for name in names}  # mean rewards of the last steps
        self._step = Metrics()
        self._falling: set[str] = set()

    def count(self, name: str, group: Group | None) -> None:
        """Count a group with its rewards before any filter; None: the group was lost to failures."""
        metrics, at = self._step, f"env/{name}"
        metrics.sum(f"{at}/groups", group is not None).sum(f"{at}/failures", group is None)
        for episode in group.episodes if group else ():
            metrics.mean(f"{at}/reward", episode.reward)
            metrics.mean(f"{at}/length", episode.trained_tokens)
            metrics.mean(f"{at}/truncated", episode.status is Status.TRUNCATED)
            metrics.mean(f"time/{at}", episode.usage.seconds)
        if group:
            metrics.mean(f"{at}/pass_rate", pass_rate(group, 0.5))

    def metrics(self) -> Metrics:
        """Return the metrics of a step, named ``env/NAME/...``; ``falling`` is 1 for an environment with a warning."""
        metrics, self._step = self._step, Metrics()
        means = metrics.result()
        for name, rewards in self.history.items():
            if (mean := means.get(f"env/{name}/reward")) is not None:
                rewards.append(mean)
                del rewards[: -2 * _WINDOW]
        falling = self._falling_now()
        for name in self.history:
            metrics.mean(f"env/{name}/falling", name in falling)
            if name in falling - self._falling:
                before, after = _halves(self.history[name])
                log.warning(
                    "the reward of %s falls while the mean of all environments rises: from %.3g to %.3g in %d steps",
                    name, statistics.fmean(before), statistics.fmean(after), _WINDOW,
                )  # fmt: skip
        self._falling = falling
        return metrics

    def _falling_now(self) -> set[str]:
        """Return the environments whose reward falls by more than chance, if the mean over all of them rises."""
        full = {name: _halves(rewards) for name, rewards in self.history.items() if len(rewards) == 2 * _WINDOW}
        rises = sum(statistics.fmean(after) - statistics.fmean(before) for before, after in full.values()) > 0
        return {name for name, (before, after) in full.items() if rises and _falls(before, after)}


def _halves(rewards: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    return rewards[:_WINDOW], rewards[_WINDOW:]


def _falls(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether the mean fell by more than the variance between steps explains."""
    error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / _WINDOW)
    return statistics.fmean(after) - statistics.fmean(before) < -max(_SURE * error, 1e-9)
