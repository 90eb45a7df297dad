"""Plays the episodes of one task concurrently with one generator (or, with several policies, one for each), rewards
them, and returns them as a group. See ``source.py`` for who waits for whom."""

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from whet.base.closing import gather_or_cancel
from whet.base.errors import ConfigError, DataError, WhetError
from whet.base.seeds import derive_seed
from whet.chat.renderer import Renderer
from whet.core.types import Episode, Group, Status, Task
from whet.engines.base import Engine
from whet.metrics.clock import Timing
from whet.processes.loop_thread import format_error
from whet.rollouts.blend import Blend
from whet.rollouts.config import RolloutConfig
from whet.rollouts.episode import play
from whet.rollouts.failures import Failures
from whet.rollouts.rewards import Reward, Score, compose
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import NO_CAST, Cast
from whet.tasks.base import Environments, checked_score
from whet.tasks.isolated import IsolatedEnvironments

if TYPE_CHECKING:
    from whet.endpoint.server import Endpoint


class GroupPlayer:
    """Plays groups. ``timing`` and ``failures`` cover all groups. ``declared``: the task set's names of scores; empty
    if they become known with the episodes."""

    def __init__(
        self,
        config: RolloutConfig,
        sampling: Sampling,
        environments: IsolatedEnvironments,
        generator: Engine[object],
        renderer: Renderer,
        *,
        rewards: Reward = Score(),  # noqa: B008
        declared: Collection[str] = (),
        blend: Blend | None = None,
        seed: int = 0,
        endpoint: "Endpoint | None" = None,
        cast: Cast = NO_CAST,
    ) -> None:
        self.config, self.sampling, self.environments = config, sampling, environments
        self.generator, self.renderer, self.endpoint, self.cast = generator, renderer, endpoint, cast
        self.rewards, self.declared, self.blend, self.seed = rewards, declared, blend, seed
        self.timing, self.failures = Timing(), Failures()
        self._slots = asyncio.Semaphore(config.concurrency)

    async def play(
        self,
        task: Task,
        uid: str,
        size: int,
        sampling: Sampling | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> Group:
        """Return the group ``uid`` of ``size`` episodes, whose seeds derive from ``uid``. ``ended`` is called after
        each episode. ``sampling`` replaces the run's settings. If ``score_group`` failed, the group has a single failed
        episode."""
        settings = self.sampling_of(task, sampling)
        # no episode may continue in environments that are about to be closed
        episodes = await gather_or_cancel(self._episode(task, uid, sample, settings, ended) for sample in range(size))
        group = Group(uid, task, episodes)
        if not any(episode.status is Status.FAILED for episode in episodes):
            await self._reward(task, group)
        return group

    def sampling_of(self, task: Task, sampling: Sampling | None = None) -> Sampling:
        """Return the sampling settings of a task, within the limits of its environment if there is a blend."""
        settings = sampling or self.sampling
        return self.blend.of[task.environment].sampling.under(settings) if self.blend else settings

    async def _episode(
        self, task: Task, uid: str, sample: int, sampling: Sampling, ended: Callable[[], None]
    ) -> Episode:
        async with self._slots:
            with self.timing.episode(f"{uid}/{sample}") as played:
                episode = await play(
                    self.environments,
                    task,
                    self.generator,
                    self.renderer,
                    sampling,
                    retries=self.config.retries,
                    retry_delay=self.config.retry_delay,
                    deadline=self.config.episode_deadline,
                    seed=derive_seed(self.seed, "rollout", uid, sample),
                    session=f"{uid}/{sample}",
                    timing=self.timing,
                    failures=self.failures,
                    endpoint=self.endpoint,
                    cast=self.cast,
                )
                played.status, played.tokens = episode.status.value, episode.trained_tokens
        ended()
        return episode

    async def _reward(self, task: Task, group: Group) -> None:
        """Call the environment's ``score_group``, and compose the rewards of the episodes."""
        rewards, declared = self.rewards, self.declared
        if self.blend is not None:
            part = self.blend.of[task.environment]
            rewards, declared = part.rewards or rewards, part.taskset.score_names
        try:
            await score_group(self.environments, task, group)
            for episode in group.episodes:
                compose(rewards, episode, declared)
            where = f"of {group.uid} after score_group"
            for episode in group.episodes:
                episode.reward = checked_score("reward", episode.reward, where)
                for name, value in episode.scores.items():
                    episode.scores[name] = checked_score(name, value, where)
        except Exception as error:
            if isinstance(error, WhetError) and not isinstance(error, DataError):
                raise
            group.episodes = [Episode([], status=Status.FAILED, error=f"score_group: {format_error(error)}")]


async def score_group(environments: Environments, task: Task, group: Group) -> None:
    """Call the environment's ``score_group``. With roles it may change ``rewards``, whose mean is then the episode's.
    Raises ``ConfigError`` if it changes the reward alone, from which no role would learn, or which roles there are."""
    before = [(episode, episode.reward, dict(episode.rewards)) for episode in group.episodes]
    await environments.score_group(task, group)
    for episode, reward, by_role in before:
        if not by_role:
            continue
        if episode.rewards.keys() != by_role.keys() or (episode.rewards == by_role and episode.reward != reward):
            raise ConfigError(
                f"score_group set the reward of an episode of {group.uid}, but each role learns from a separate reward "
                f"({', '.join(by_role)}): set all of episode.rewards, or choose a task set without roles"
            )
        if episode.rewards != by_role:
            where = f"of {group.uid} after score_group"
            episode.rewards = {role: checked_score("reward", earned, where) for role, earned in episode.rewards.items()}
            episode.reward = sum(episode.rewards.values()) / len(episode.rewards)
