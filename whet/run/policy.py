"""A model that samples, scores and learns, for scripts, notebooks and the loop in ``train.py``.

    tasks ──sample──► groups ──batch──► Batch ──(your advantages, weigh)──► update(batch, loss) ──► publish ──┐
      ▲                                                                                                       │
      └───────────────────────────── the generator samples with the new weights ◄─────────────────────────────┘

It has no settings: recipes have them. Everything that computes does so on the compute thread of the process, on ranks
or in engines; awaiting a method never blocks the event loop.
"""

import logging
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from whet.base.closing import gather_or_cancel
from whet.base.errors import ConfigError, DataError
from whet.checkpoint.policy import FURTHER, policy_folder
from whet.cluster.lease import Devices
from whet.core.batch import Batch
from whet.core.types import Distribution, Group, Status, Task
from whet.learner.base import Learner, Update
from whet.losses.base import Loss
from whet.metrics import Metrics
from whet.rollouts.group_metrics import count_group
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.sampling import Sampling
from whet.run.policies import everything

if TYPE_CHECKING:
    from whet.chat.renderer import Renderer
    from whet.engines.base import Engine
    from whet.weights.base import WeightSync

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Sampler:
    """The parts that a policy samples with."""

    player: GroupPlayer
    generator: "Engine[object]"
    sync: "WeightSync"  # transfers the weights to the generator


class Policy:
    """``learners`` has one for each role of the algorithm, the main one first; ``trained`` are the roles that learn.
    ``sampler`` is None for a run that learns from rows. A further policy has a ``name``; ``plays`` tells which roles of
    the episodes it plays and learns from."""

    def __init__(
        self,
        renderer: "Renderer",
        learners: Mapping[str, Learner],
        trained: Collection[str],
        devices: Devices,
        distribution: Distribution,
        sampler: Sampler | None = None,
        name: str = "",
        plays: Callable[[str], bool] = everything,
    ) -> None:
        self.renderer, self.learners, self.devices, self.sampler = renderer, learners, devices, sampler
        self.trained, self.main_role = tuple(trained), next(iter(learners))
        self.distribution = distribution  # that log-probs are taken under
        self.name, self.plays = name, plays
        self.version = 0  # of the weights that the generator has
        self.metrics = Metrics()  # of what was sampled, learned and published since they were last taken
        self._groups = 0

    async def sample(self, tasks: Sequence[Task], n: int = 1, sampling: Sampling | None = None) -> list[Group]:
        """Play ``n`` episodes of each task and return a group for each, in order. ``sampling`` replaces the recipe's
        settings. The seeds derive from the recipe's seed and the number of groups sampled so far.

        A group in which an episode failed after all retries has ``Status.FAILED`` episodes, which carry no reward;
        ``batch`` leaves it out. Raises ``ConfigError`` where the recipe learns from rows and has no generator."""
        if isinstance(tasks, Task | str) or not all(isinstance(task, Task) for task in tasks):
            raise DataError(f"sample takes a list of tasks, as run.tasks.next(4) returns, not {reprlib.repr(tasks)}")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise DataError(f"sample plays n episodes of each task, and n is {n!r}; give a whole number from 1 on")
        player = self._sampler().player
        first, self._groups = self._groups, self._groups + len(tasks)
        async with self.devices.acquire("generation"):
            groups = await gather_or_cancel(
                player.play(task, f"{first + i:07d}:{task.uid}", n, sampling) for i, task in enumerate(tasks)
            )
        for group in groups:
            if not _failed(group):
                count_group(self.metrics, group, player.sampling_of(group.task, sampling).mode, self.version)
        return groups

    def share(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with what this policy did; those in which it never replied are left out."""
        if self.plays is everything:
            return list(groups)
        return [part for group in groups if (part := group.of_roles(self.plays)).episodes]

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Lay out the tokens of the groups, prompts shared where the model can. Groups with a failed episode are left
        out, with a warning, and so is what other policies did. Raises ``DataError`` where nothing is left."""
        if not groups or isinstance(groups, Group) or not all(isinstance(group, Group) for group in groups):
            raise DataError(f"batch takes a list of groups, as sample returns, not {reprlib.repr(groups)}")
        whole = [group for group in groups if not _failed(group)]
        if len(whole) < len(groups):
            failed = next(group for group in groups if _failed(group))
            why = next(episode.error for episode in failed.episodes if episode.status is Status.FAILED)
            text = f"{len(groups) - len(whole)} of {len(groups)} groups failed and are left out: {failed.uid}: {why}"
            if not whole:
                raise DataError(text)
            log.warning(text)
        if not (share := self.share(whole)):
            raise DataError(f"the policy {self.name or 'of the section model'} replied in none of the groups")
        return Batch.from_groups(share, share_prompts=self.shares_prompts, distribution=self.distribution)

    @property
    def shares_prompts(self) -> bool:
        """Return whether sequences can share their prompt: every role's attention is whet's."""
        return all(learner.facts.forest for learner in self.learners.values())

    async def score(self, batch: Batch, outputs: set[str], role: str | None = None) -> dict[str, Tensor]:
        """Return outputs of the model of a role (by default the main one) by name: ``logprobs``, ``entropy``,
        ``values``, ``reference_logprobs``, each [N] over the batch's tokens. The batch's columns
        ``reference_logprobs`` and ``values``, which losses read, are filled as well."""
        outputs = {outputs} if isinstance(outputs, str) else set(outputs)
        async with self.devices.acquire("learning"):
            scored = await self._learner(role).score(batch, outputs)
        for name in ("reference_logprobs", "values"):
            if name in scored:
                batch.fill(name, scored[name])
        return scored

    async def update(self, batch: Batch, loss: Loss, role: str | None = None) -> Update:
        """Take one optimizer step on a weighed batch: forward and backward over micro-batches, then the step. Return
        its metrics and the log-probs before the step. Raises ``DataError`` for a batch without weights."""
        if not isinstance(batch, Batch):
            raise DataError(f"update takes a batch, as policy.batch(groups) returns, not a {type(batch).__name__}")
        if isinstance(loss, type) or not all(hasattr(loss, name) for name in ("reads", "outputs", "unit")):
            what = f"the class {loss.__name__}; call it" if isinstance(loss, type) else f"a {type(loss).__name__}"
            raise DataError(f"update takes a loss, such as PolicyLoss() or a WeightedLoss of yours, not {what}")
        if batch.share is None:
            raise DataError('the batch has no weights: pass batch.weigh("token"), which says what each token counts')
        async with self.devices.acquire("learning"):
            return await self._learner(role).update(batch, loss)

    async def publish(self, version: int | None = None) -> Metrics:
        """Send the policy's weights to the generator and prove that they have arrived. Requests in flight wait and
        continue under the new weights. By default the version is the next number. Raises ``RefitError`` naming the
        tensor that differs. Without a generator there is nothing to do."""
        version = self.version + 1 if version is None else version
        metrics = Metrics()
        if self.sampler is not None:
            metrics = await self.sampler.sync.publish(self.learners["policy"], self.sampler.generator, version)
        self.version = version  # unchanged if the weights have not arrived
        if self.sampler is None:
            return metrics
        return metrics.merge(self.sampler.generator.tally())

    async def save(self, folder: str | Path) -> None:
        """Write weights and optimizer of every trained role into ``folder``, which is made; ``load`` restores them to
        the bit. Raises ``ConfigError`` for a folder that is not empty."""
        folder = Path(folder).absolute()
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; save into a new folder")
        for role in self.trained:
            (folder / role).mkdir(parents=True)
            async with self.devices.acquire("learning"):
                await self.learners[role].save(folder / role)

    async def load(self, folder: str | Path) -> None:
        """Restore what ``save`` wrote. The generator keeps its weights until the next ``publish``."""
        for role in self.trained:
            part = Path(folder).absolute() / role
            if not part.is_dir():
                raise ConfigError(f"{folder} holds no weights of the {role}: there is no folder {part}")
            async with self.devices.acquire("learning"):
                await self.learners[role].load(part)

    def place(self, folder: Path) -> Path:
        """Return the folder of this policy in the folder of a run or a checkpoint."""
        return policy_folder(folder, self.name)

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics."""
        return f"{FURTHER}/{self.name}/" if self.name else ""

    def _learner(self, role: str | None) -> Learner:
        role = role or self.main_role
        if role not in self.learners:
            raise ConfigError(f"there is no role {role!r}; the recipe's algorithm has: {', '.join(self.learners)}")
        return self.learners[role]

    def _sampler(self) -> Sampler:
        if self.sampler is None:
            raise ConfigError(
                "this recipe learns from rows, so it has no generator to sample with; choose an online "
                "algorithm such as algorithm=grpo and a task set as data"
            )
        return self.sampler


def _failed(group: Group) -> bool:
    return any(episode.status is Status.FAILED for episode in group.episodes)
