"""The supply of a run: episodes that its policy plays, or rows of a data set, to learn from and to evaluate on. A feed
has a source of groups, receives each new version of the weights, and evaluates; the loop treats both kinds alike."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.closing import Closing
from whet.chat.control_tokens import encoded
from whet.chat.renderer import Renderer
from whet.cluster.lease import Devices, TenantGroup
from whet.core.content import words_of
from whet.core.types import Distribution, Group, Message, Task
from whet.data.source import Source
from whet.endpoint.judge_model import JudgeModel
from whet.endpoint.server import Endpoint
from whet.engines.base import PausableEngine, pausable
from whet.learner.base import Learner, Scorer
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
from whet.run.evaluation_warnings import EvaluationWarnings
from whet.run.mismatch_alarm import MismatchAlarm
from whet.run.policies import cast_of
from whet.run.policy import Sampler
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.listing import tasks_of
from whet.tasks.validate import require

if TYPE_CHECKING:
    from whet.cluster.base import Cluster
    from whet.run.recipe import Recipe
    from whet.run.steps import Lesson


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
        self.recipe = recipe
        self.devices = devices or Devices({}, shared=False)
        self.main = Player(build_generator(recipe, renderer, cluster), renderer)
        self.further_players = further_players(recipe, cluster)
        self._share_devices()
        self.environments = IsolatedEnvironments(recipe.taskset.open())
        judge = JudgeModel(self.main.generator, renderer, recipe.generator.max_context)
        self.environments.use_policy(judge.answer)
        self.endpoint = Endpoint(renderer, recipe.endpoint)
        player = self._group_player()
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
        self.sampler = self._sampler(recipe, player, self.main)
        self.further = {
            name: self._sampler(recipe.of_policy(name), player, each) for name, each in self.further_players.items()
        }
        self._checked_sets = False
        self._evaluation_warnings = EvaluationWarnings(source.tasks, recipe.evaluation.split)
        self._mismatch_alarm = MismatchAlarm(recipe.rollouts, self.further_players)
        estimator = recipe.online.estimator
        self._no_signal = NoSignal() if estimator is not None and estimator.compares else None
        self._unheard = Unheard()

    def _share_devices(self) -> None:
        """Let the engines take turns with the learner, if they can pause. Otherwise they keep their weights while the
        learner computes."""
        engines = [self.main.generator, *(player.generator for player in self.further_players.values())]
        if self.recipe.devices.placement == "colocated" or all(isinstance(each, PausableEngine) for each in engines):
            pausing = [pausable(each, "devices.placement=colocated") for each in engines]
            self.devices.tenants["generation"] = TenantGroup(pausing) if len(pausing) > 1 else pausing[0]
        else:
            self.devices.shared = False

    def _group_player(self) -> GroupPlayer:
        recipe = self.recipe
        return GroupPlayer(
            recipe.rollouts,
            recipe.sampling,
            self.environments,
            self.main.generator,
            self.main.renderer,
            rewards=recipe.rewards,
            declared=recipe.taskset.score_names,
            blend=recipe.taskset if isinstance(recipe.taskset, Blend) else None,
            seed=recipe.seed,
            endpoint=self.endpoint,
            cast=cast_of(recipe, self.main, self.further_players),
        )

    def _sampler(self, recipe: "Recipe", group_player: GroupPlayer, player: Player) -> Sampler:
        """Return the parts that one policy, whose recipe is given, samples with."""
        text = _probe_text(player.renderer, self.source.tasks[0])
        return Sampler(group_player, player.generator, build_sync(recipe, text, self.devices))

    async def prepare(self, learners: Mapping[str, Learner], folder: Path, steps: range) -> Mapping[str, Scorer]:
        self.recipe.weights.check_device(learners["policy"].facts.device, self.recipe.shares_nodes)
        self.source.ledger.compare(folder)
        if self.recipe.validation.required:
            await require(self.recipe.taskset, self.recipe.validation.samples)
        return learners

    async def evaluate(self, scorers: Mapping[str, Scorer]) -> dict[str, float]:
        if not self._checked_sets:
            await check_sets(self.recipe.evaluation.sets, self.main.renderer)
            self._checked_sets = True
        async with self.devices.acquire("generation"):
            report = await evaluate_recipe(
                self.recipe, self.environments, self.main, self.endpoint, self.further_players
            )
        self._evaluation_warnings.check(report)
        return report.metrics()

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Warn if nothing can be learned, or if generator and learner disagree. Raises ``WhetError`` above
        ``rollouts.max_mismatch``."""
        if self._no_signal is not None:
            self._no_signal.check(step, values)
        self._mismatch_alarm.check(step, values)

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
            closing.closes("the generator", self.main.generator.close)
            for name, player in self.further_players.items():
                closing.closes(f"the generator of {name}", player.generator.close)
            closing.closes("the endpoint", self.endpoint.close)
            closing.closes("the environments", self.environments.close)


def _probe_text(renderer: Renderer, task: Task) -> list[int]:
    """The task's own words: a chat template's tokens are too predictable to tell weights apart."""
    words = " ".join(words_of(message["content"]) for message in task.prompt)
    tokens = encoded(renderer.tokenizer, words)[-64:]
    fallback: Message = {"role": "user", "content": words or "How much is seven times eight?"}
    return tokens if len(tokens) > 8 else renderer.render_prompt([fallback])
