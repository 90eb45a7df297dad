"""The supply of a run: episodes that its policy plays, or rows of a data set, to learn from and to evaluate on. A feed
has a source of groups, receives each new version of the weights, and evaluates; the loop treats both kinds alike."""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.closing import Closing
from whet.base.errors import WhetError
from whet.chat.control_tokens import encoded
from whet.chat.renderer import Renderer
from whet.checkpoint.policy import FURTHER
from whet.cluster.lease import Devices, TenantGroup
from whet.core.content import words_of
from whet.core.types import Distribution, Group, Message, Task
from whet.data.source import Source
from whet.endpoint.judge_model import JudgeModel
from whet.endpoint.server import Endpoint
from whet.engines.base import PausableEngine, pausable
from whet.learner.base import Learner, Scorer
from whet.losses.off_policy import MISMATCH
from whet.metrics.rollout_file import write_rollouts
from whet.rollouts.blend import Blend
from whet.rollouts.filters import Filter
from whet.rollouts.group_player import GroupPlayer
from whet.rollouts.no_signal import NoSignal
from whet.rollouts.recorder import failures, records
from whet.rollouts.replay import keep_groups
from whet.rollouts.session import Player
from whet.rollouts.source import RolloutSource
from whet.rollouts.unheard import Unheard
from whet.run.build import build_generator, build_sync, further_players
from whet.run.evaluate import check_sets, evaluate_recipe
from whet.run.policies import cast_of
from whet.run.policy import Sampler
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.listing import tasks_of
from whet.tasks.validate import require

if TYPE_CHECKING:
    from whet.cluster.base import Cluster
    from whet.run.recipe import Recipe
    from whet.run.steps import Lesson

log = logging.getLogger(__name__)


class Feed:
    """The supply of groups of one run. By default nothing is prepared, measured, checked or recorded."""

    def __init__(
        self, source: Source, distribution: Distribution, longest: int | None, groups_per_epoch: int = 0
    ) -> None:
        """``distribution``: that log-probs are taken under. ``longest``: the most tokens that an answer may have, which
        ``weighting=constant`` divides by. ``groups_per_epoch``: the number of tasks or rows; 0 if there is none."""
        self.source, self.distribution, self.longest = source, distribution, longest
        self.groups_per_epoch = groups_per_epoch
        self.sampler: Sampler | None = None
        self.further: Mapping[str, Sampler] = {}  # the samplers of further policies

    async def prepare(self, learners: Mapping[str, Learner], folder: Path, steps: range) -> Mapping[str, Scorer]:
        """Do what is to be done once before the ``steps`` (from 0; steps that are done are not in the range). Return
        the scorers for them."""
        return learners

    async def evaluate(self, scorers: Mapping[str, Scorer]) -> dict[str, float]:
        """Return one evaluation line; empty where there is nothing to measure on."""
        return {}

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check the metrics of a step. Raises ``WhetError`` if the run must not continue."""

    def record(self, folder: Path, step: int, groups: list[Group], lessons: "Sequence[Lesson]") -> None:
        """Write what was sampled into the run folder, and what each policy learned from it."""

    async def close(self) -> None:
        """Close what the feed holds."""


class SampledFeed(Feed):
    """Episodes of the policy over a task set, through a generator. ``filters`` are the algorithm's by default.
    ``cluster``: where engines run with ``generator.on_cluster``."""

    source: RolloutSource

    def __init__(
        self,
        recipe: "Recipe",
        renderer: Renderer,
        filters: tuple[Filter, ...] | None = None,
        devices: Devices | None = None,
        cluster: "Cluster | None" = None,
    ) -> None:
        self.recipe, self.renderer = recipe, renderer
        self.devices = devices or Devices({}, shared=False)
        self.generator = build_generator(recipe, renderer, cluster)
        self.players = further_players(recipe, cluster)
        generators = [self.generator, *(player.generator for player in self.players.values())]
        if recipe.devices.placement == "colocated" or all(isinstance(each, PausableEngine) for each in generators):
            each_pauses = [pausable(each, "devices.placement=colocated") for each in generators]
            self.devices.tenants["generation"] = TenantGroup(each_pauses) if self.players else each_pauses[0]
        else:
            self.devices.shared = False  # it keeps its weights while the learner computes
        self.environments = IsolatedEnvironments(recipe.taskset.open())
        self.environments.use_policy(JudgeModel(self.generator, renderer, recipe.generator.max_context).answer)
        self.endpoint = Endpoint(renderer, recipe.endpoint)
        player = GroupPlayer(
            recipe.rollouts,
            recipe.sampling,
            self.environments,
            self.generator,
            renderer,
            rewards=recipe.rewards,
            declared=recipe.taskset.score_names,
            blend=recipe.taskset if isinstance(recipe.taskset, Blend) else None,
            seed=recipe.seed,
            endpoint=self.endpoint,
            cast=cast_of(recipe, Player(self.generator, renderer), self.players),
        )
        source = RolloutSource(
            recipe.rollouts,
            tasks_of(recipe.taskset, "train"),
            player,
            group_size=recipe.online.group_size,
            filters=recipe.online.filters if filters is None else filters,
            pairing=recipe.online.pairing if filters is None else (),
            seed=recipe.seed,
        )
        super().__init__(source, recipe.sampling.distribution, recipe.sampling.max_new_tokens, len(source.tasks))
        self._disagrees = False  # in the last step
        self._checked = self._warned_of_accuracy = self._warned_of_both = False
        self._apart = set[str]()  # evaluated tasks that are not trained on
        estimator = recipe.online.estimator
        self._no_signal = NoSignal() if estimator is not None and estimator.compares else None
        self._unheard = Unheard()
        sync = build_sync(recipe, _probe_text(renderer, source.tasks[0]), self.devices)
        self.sampler = Sampler(player, self.generator, sync)
        self.further = {
            name: Sampler(
                player,
                each.generator,
                build_sync(recipe.of_policy(name), _probe_text(each.renderer, source.tasks[0]), self.devices),
            )
            for name, each in self.players.items()
        }

    async def prepare(self, learners: Mapping[str, Learner], folder: Path, steps: range) -> Mapping[str, Scorer]:
        self.recipe.weights.check_device(learners["policy"].facts.device, self.recipe.shares_nodes)
        self.source.ledger.compare(folder)
        if self.recipe.validation.required:
            await require(self.recipe.taskset, self.recipe.validation.samples)
        return learners

    async def evaluate(self, scorers: Mapping[str, Scorer]) -> dict[str, float]:
        if not self._checked:
            await check_sets(self.recipe.evaluation.sets, self.renderer)
            self._checked = True
        async with self.devices.acquire("generation"):
            main = Player(self.generator, self.renderer)
            report = await evaluate_recipe(self.recipe, self.environments, main, self.endpoint, self.players)
        both = [] if self._warned_of_both else self._trained_on({task.uid for task, _ in report.episodes})
        if both:
            self._warned_of_both = True
            log.warning(
                "%d of the %d tasks that are evaluated are trained on, such as %s, so their accuracy says little about "
                "other tasks: return others for the split test", len(both), report.n, both[0],
            )  # fmt: skip
        if report.by_sign and not self._warned_of_accuracy:
            self._warned_of_accuracy = True
            log.warning(
                "evaluation/accuracy is the share of rewards above 0, because answers have no score 'correct', and "
                "rewards other than 0 and 1: compare evaluation/reward, or return a score 'correct'"
            )
        return report.metrics()

    def _trained_on(self, evaluated: set[str]) -> list[str]:
        """Return the evaluated tasks of the split ``test`` that are trained on. The training tasks are walked over,
        because they may be many more than can be held."""
        new = evaluated - self._apart if self.recipe.evaluation.split == "test" else set[str]()
        both = [task.uid for task in self.source.tasks if task.uid in new] if new else []
        self._apart |= new.difference(both)
        return list(dict.fromkeys(both))

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Warn at the first step at which generator and learner disagree, and if nothing can be learned. Raises
        ``WhetError`` above ``rollouts.max_mismatch``."""
        if self._no_signal is not None:
            self._no_signal.check(step, values)
        rollouts, old = self.recipe.rollouts, values.get("staleness/max", 0.0)
        keys = [MISMATCH, *(f"{FURTHER}/{name}/{MISMATCH}" for name in self.players)]
        error, key = max((values.get(key, 1.0), key) for key in keys)
        cause = "`whet doctor RECIPE` looks for the cause"
        if old:
            cause = f"Some were sampled by weights {old:g} steps old, which explains a part of it; {cause} of the rest"
        message = (
            f"in step {step} {key} is {error:.4g}, above rollouts.{{}} = {{:g}}: the log-probs that the generator "
            f"gives its tokens are not the learner's. {cause}"
        )
        if rollouts.max_mismatch is not None and error > rollouts.max_mismatch:
            raise WhetError(message.format("max_mismatch", rollouts.max_mismatch))
        disagrees = error > rollouts.mismatch_alarm
        if disagrees and not self._disagrees:
            log.warning(message.format("mismatch_alarm", rollouts.mismatch_alarm))
        self._disagrees = disagrees

    def record(self, folder: Path, step: int, groups: list[Group], lessons: "Sequence[Lesson]") -> None:
        self.source.ledger.write(folder)
        self._unheard.check(step, groups)
        if self.recipe.rollouts.keep_groups:
            keep_groups(folder, step, groups)
        every = self.recipe.rollouts.record_every
        if every and step % every == 0:
            lost = failures(step, self.source.lost)
            learned = (records(step, each.groups, each.batch, each.policy.renderer) for each in lessons)
            write_rollouts(folder, step, chain(*learned, lost))

    async def close(self) -> None:
        async with Closing() as closing:
            closing.closes("the generator", self.generator.close)
            for name, player in self.players.items():
                closing.closes(f"the generator of {name}", player.generator.close)
            closing.closes("the endpoint", self.endpoint.close)
            closing.closes("the environments", self.environments.close)


def _probe_text(renderer: Renderer, task: Task) -> list[int]:
    """The task's own words: a chat template's tokens are too predictable to tell weights apart."""
    words = " ".join(words_of(message["content"]) for message in task.prompt)
    tokens = encoded(renderer.tokenizer, words)[-64:]
    fallback: Message = {"role": "user", "content": words or "How much is seven times eight?"}
    return tokens if len(tokens) > 8 else renderer.render_prompt([fallback])
