"""Start, resume and shut down a run: its objects are built from a recipe or restored from a run folder. The loop is in
``train.py``; the work between two steps is in ``steps.py``."""

import asyncio
import logging
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from whet.algorithms.base import OnlineAlgorithm
from whet.base.closing import Closing
from whet.base.digests import unchanged
from whet.base.errors import ConfigError, DataError, GeneratorError, WorkerError
from whet.base.files import remove_leftovers, write_atomically
from whet.base.progress import PROGRESS
from whet.base.strict_json import JsonObject
from whet.chat.renderer import Renderer
from whet.checkpoint.lock import run_lock
from whet.checkpoint.mirror import Mirror
from whet.checkpoint.policy import policy_folder
from whet.checkpoint.store import CheckpointStore
from whet.cluster.base import Cluster
from whet.cluster.lease import Devices, TenantGroup
from whet.config import Loaded, dump_yaml, load
from whet.config.tree import DEFAULT, dotted, from_plain
from whet.config.yaml_text import parse_mapping
from whet.learner.state import FACTS
from whet.lineage.reading import record_run
from whet.lineage.record import read_record
from whet.metrics.rollout_file import drop_rollouts_after
from whet.metrics.sinks import OpenSinks
from whet.metrics.sinks.jsonl import FILE as METRICS
from whet.metrics.sinks.jsonl import check_metrics, read_lines, truncate_after
from whet.models.device import choose_device
from whet.processes.compute import compute, run_computing
from whet.processes.loop_thread import exit_forked_children
from whet.rollouts.ledger import FILE as LEDGER
from whet.rollouts.replay import KeptSource, drop_groups_after
from whet.run.feed import Feed, SampledFeed
from whet.run.folder import Place, check_steps, create
from whet.run.log import logging_to, versions
from whet.run.machine import decide_run, read
from whet.run.patience import Patience
from whet.run.policies import in_words, models_of, plays
from whet.run.policy import Policy
from whet.run.recipe import Recipe
from whet.run.rows_feed import RowsFeed
from whet.run.saver import Saver
from whet.run.signals import StopRequest, stop_signals
from whet.run.steps import OnStep, Restarts, Run
from whet.run.usage import Usage

log = logging.getLogger(__name__)


def start(recipe: Recipe, folder: Path, stop: StopRequest | None = None, on_step: OnStep | None = None) -> Path:
    """Train from the beginning into a new ``folder``, and return it. ``stop`` lets the caller end the run."""
    create(folder)
    folder = folder.absolute()  # workers may have other working folders, and this process's may change
    write_atomically(folder / "recipe.yaml", dump_yaml(recipe))
    return _train(recipe, folder, resuming=False, asked=stop, on_step=on_step)


def resume(
    folder: Path, overrides: Sequence[str] = (), stop: StopRequest | None = None, on_step: OnStep | None = None
) -> Path:
    """Resume from the newest intact checkpoint or, with a warning, from the beginning if there is none yet."""
    folder = folder.absolute()
    path = folder / "recipe.yaml"
    loaded = load(Recipe, path, list(overrides))
    lacking = _lacking(path, loaded)
    if lacking:
        _check_as_written(folder, lacking)
    return _train(loaded.value, folder, resuming=True, asked=stop, on_step=on_step, lacking=lacking)


def _lacking(path: Path, loaded: Loaded[Recipe]) -> list[str]:
    """Return the settings that a run's recipe, which had all when it was written, lacks. ``loaded`` has overrides, too,
    whose settings may have others, with defaults."""
    with suppress(ConfigError):  # of a recipe that is valid with the overrides only
        loaded = load(Recipe, path)
    written = from_plain(parse_mapping(path.read_text("utf-8"), str(path)))
    keys = [tuple(key.split(".")) for key, origin in loaded.origins.items() if origin == DEFAULT]
    rests = {key: written.find(key)[1] for key in keys}
    return list(dict.fromkeys(dotted(key[: len(key) - len(rest) + 1]) for key, rest in rests.items() if rest))


def _check_as_written(folder: Path, lacking: Sequence[str]) -> None:
    """Raise ``ConfigError`` if the recipe, which lacks some settings, is not as the run wrote it. An earlier version of
    whet may have written it without them."""
    path = folder / "recipe.yaml"
    with suppress(DataError):  # of a damaged record, which is named later
        if (record := read_record(folder)) is not None and record.recipe and not unchanged(path, record.recipe):
            names = ", ".join(lacking[:5]) + ", ..." * (len(lacking) > 5)
            raise ConfigError(
                f"{path} was cut or edited: it lacks {names}, which would take defaults. Put the file back; settings "
                f"are changed as in: whet resume {shlex.quote(str(folder))} KEY=VALUE"
            )


def _train(
    recipe: Recipe,
    folder: Path,
    resuming: bool,
    asked: StopRequest | None,
    on_step: OnStep | None,
    lacking: Sequence[str] = (),
) -> Path:
    from whet.run.train import train

    async def go() -> None:
        exit_forked_children(asyncio.get_running_loop())
        decided = await compute(decide_run, recipe, folder, resuming)
        if not resuming:
            write_atomically(folder / "recipe.yaml", dump_yaml(decided))
        with stop_signals(recipe.checkpoints.before, asked) as stop:
            restarts = Restarts()
            while True:
                try:
                    again = resuming or restarts.begun
                    async with open_run(decided, folder, resuming=again, stop=stop, restarts=restarts) as run:
                        run.on_step = on_step
                        check_steps(folder, run.recipe, run.start)
                        if resuming:  # with the overrides
                            write_atomically(folder / "recipe.yaml", dump_yaml(decided))
                        if not restarts.count:
                            await compute(partial(record_run, decided, folder, decided.seed, again=resuming))
                        await train(run)
                    return
                except (WorkerError, GeneratorError) as error:
                    if not restarts.begun or restarts.count == recipe.cluster.restarts:
                        raise
                    restarts.count += 1
                    text = "restart %d of %d (cluster.restarts), from the newest checkpoint: %s"
                    log.warning(text, restarts.count, recipe.cluster.restarts, error)

    with run_lock(folder), logging_to(folder):
        log.info("%s into %s: %s, %s", "resuming" if resuming else "training", folder, recipe.duration, versions())
        if recipe.policies:
            log.info(in_words(recipe))
        if lacking:
            log.warning(
                "%s lacks %s, which take their defaults: it was cut or edited, or an earlier version of whet wrote it; "
                "if that is wrong, interrupt, and put the file back",
                folder / "recipe.yaml",
                ", ".join(lacking),
            )
        for warning in recipe.warnings():
            log.warning(warning)
        run_computing(go(), after=f"Resume with: whet resume {shlex.quote(str(folder))}")
    return folder


@asynccontextmanager
async def open_run(
    recipe: Recipe, folder: Path, resuming: bool, stop: StopRequest | None = None, restarts: Restarts | None = None
) -> AsyncIterator[Run]:
    """Build everything, load the newest checkpoint when resuming, and shut everything down at the end."""
    from whet.run.build import build_renderer, check_experts, check_megatron, check_reward_model, open_cluster

    async with Closing() as closing:
        in_turns = recipe.in_turns and choose_device().type == "cpu"  # the generator need not keep its weights
        shared = recipe.devices.placement == "colocated" or in_turns
        devices = Devices({}, shared=shared, deadline=recipe.devices.deadline)
        for checked in (recipe, *(policy_recipe for _, policy_recipe in models_of(recipe))):
            check_experts(checked)
            check_megatron(checked)
            check_reward_model(checked)
        renderer = build_renderer(recipe)
        cluster = await closing.enter_async_context(open_cluster(recipe))  # nothing is started
        feed = _build_feed(recipe, renderer, devices, cluster)  # the errors that are found quickly come first
        closing.closes("the feed", feed.close)
        recipe = recipe.with_steps(feed.groups_per_epoch)
        store = CheckpointStore(folder / "checkpoints", recipe.checkpoints)
        store.clean()
        checkpoint = store.load_latest() if resuming else None
        resume_step = (checkpoint.step if checkpoint else -1) if resuming else None
        step = checkpoint.step if checkpoint else 0
        mirror = await Mirror.of(store, step if resuming else None)
        sinks = OpenSinks.of(recipe.sinks, folder, recipe.model_dump(mode="json"), resume_step)
        closing.closes("the sinks", sinks.close)
        PROGRESS.begin("loading the model")
        policy, *further = await _open_policies(recipe, folder, renderer, feed, devices, cluster, closing)
        devices.tenants["learning"] = TenantGroup(
            learner for each in (policy, *further) for learner in each.learners.values()
        )
        devices.awake = "learning"
        if checkpoint is not None:
            check_all_loaded(checkpoint.folder, (policy, *further))
            for each in (policy, *further):
                await each.load(each.place(checkpoint.folder))
            feed.source.load_state(checkpoint.state["source"], checkpoint.step)
        place = Place(folder)
        run = Run(
            recipe=recipe,
            place=place,
            start=step,
            feed=feed,
            policy=policy,
            further=further,
            scorers=policy.learners,
            saver=Saver(place, store, mirror, (policy, *further)),
            devices=devices,
            sinks=sinks,
            usage=Usage.of(recipe, folder, policy.learners),
            patience=Patience(recipe.evaluation.patience, recipe.checkpoints.best_metric, recipe.checkpoints.mode),
            stop=stop or StopRequest(),
            restarts=restarts or Restarts(),
        )
        closing.closes("the checkpoint that is being written", run.saver.close)
        if resuming and checkpoint is None:
            log.warning("%s has no complete checkpoint yet: the run starts again from the beginning", folder)
        if resuming:
            rewind(folder, run.start)
        if checkpoint is not None and "patience" in checkpoint.state:
            run.patience.load_state(checkpoint.state["patience"])
        if facts := _facts(run):
            run.sinks.write(run.start, {f"run/{name}": value for name, value in facts.items()})
        yield run


def _facts(run: Run) -> JsonObject:
    """Return the facts of a run for its metrics: at its start the facts of its learners, and its number of steps where
    neither the recipe nor the metrics have it."""
    length = run.start if run.patience.over else run.recipe.steps
    reported, in_recipe = reported_length(run.folder), run.recipe.epochs is None and not run.patience.over
    facts: JsonObject = {} if reported == length or (reported is None and in_recipe) else {"steps": length}
    if run.start:
        return facts
    main = run.recipe.algorithm.main_role
    facts |= run.policy.learners[main].facts.shown()
    if (decision := read(run.folder)) is not None:
        facts["computes_in"] = str(decision)
    for policy in run.further:
        facts |= {f"{policy.prefix}{name}": value for name, value in policy.learners[main].facts.shown().items()}
    return facts


async def _open_policies(
    recipe: Recipe,
    folder: Path,
    renderer: Renderer,
    feed: Feed,
    devices: Devices,
    cluster: Cluster,
    closing: Closing,
) -> list[Policy]:
    """Open the learners of each policy on the cluster, the main one first. ``closing`` closes them."""
    from whet.run.build import build_renderer, open_learners

    samplers = {"": feed.sampler, **feed.further}
    policies = []
    for name, policy_recipe in (("", recipe), *models_of(recipe)):
        opening = open_learners(policy_recipe, policy_folder(folder, name), cluster)
        learners = await closing.enter_async_context(opening)
        its = build_renderer(policy_recipe) if name else renderer
        policies.append(
            Policy(
                its, learners, policy_recipe.algorithm.losses, devices, feed.distribution,
                sampler=samplers[name], name=name, plays=plays(recipe, name),
            )
        )  # fmt: skip
    return policies


def _build_feed(recipe: Recipe, renderer: Renderer, devices: Devices, cluster: Cluster) -> Feed:
    """Return the feed that the recipe's algorithm learns from. A generator becomes a tenant of the devices."""
    online = isinstance(recipe.algorithm, OnlineAlgorithm)
    if online and recipe.rollouts.replay is not None:
        kept = KeptSource(Path(recipe.rollouts.replay))
        return Feed(kept, recipe.sampling.distribution, recipe.sampling.max_new_tokens)
    return SampledFeed(recipe, renderer, devices=devices, cluster=cluster) if online else RowsFeed(recipe, renderer)


def reported_length(folder: Path) -> float | None:
    """Return the last number of steps in a run's metrics; None if only its recipe has it. Metrics have it of a run by
    epochs, or one that ended early."""
    lines = read_lines(folder / METRICS, check_metrics)
    numbers = [line["run/steps"] for _, _, line in lines if line.get("run/steps") is not None]
    return numbers[-1] if numbers else None


def check_all_loaded(checkpoint: Path, policies: Sequence[Policy]) -> None:
    """Raise ``ConfigError`` if a checkpoint has weights of a model that is not trained any more, as the critic of a run
    that is resumed without one: the next checkpoints would lack them."""
    loaded = {each.place(checkpoint) / role for each in policies for role in each.trained}
    if others := sorted({facts.parent for facts in checkpoint.rglob(FACTS)} - loaded):
        raise ConfigError(
            f"{others[0]} has weights of a model that this recipe doesn't train, and they would be lost; resume with "
            "the algorithm and the policies that the run has had, or export its policy and start a new run"
        )


def rewind(folder: Path, step: int) -> None:
    """Drop the ledger, rollouts and groups of the steps that the run will repeat, and the files that a kill left. The
    sinks do the same for the metrics."""
    for part in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        remove_leftovers(part)
    drop_rollouts_after(folder, step)
    truncate_after(folder / LEDGER, step)
    drop_groups_after(folder, step)
