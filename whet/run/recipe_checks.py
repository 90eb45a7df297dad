"""Checks that the parts of a recipe fit together: settings that are right alone may contradict each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.algorithms.base import OnlineAlgorithm
from whet.algorithms.distillation import TeacherAlgorithm
from whet.algorithms.gdpo import GDPOAdvantage
from whet.config import Component
from whet.config.base import within
from whet.config.issues import did_you_mean
from whet.core.types import Distribution
from whet.data.base import ROWS, Data
from whet.data.rows import FileRows, Rows, ScoredRows
from whet.engines.adapters import BASE
from whet.losses.preference import PairLoss
from whet.losses.reward_model import BradleyTerry
from whet.models.config import ModelConfig
from whet.rollouts.blend import Blend, Part
from whet.rollouts.filters import OverlongShaping
from whet.rollouts.rewards import Score
from whet.run.policies import problems_of_policies
from whet.tasks.base import TASK_SETS, TaskSet
from whet.tasks.judges.config import own_judges

if TYPE_CHECKING:
    from whet.run.recipe import Recipe

_MOST_EPISODES = 1_000_000  # of one step: its groups are held in memory together


def check_parts(recipe: "Recipe") -> None:
    """Raise ``ValueError`` for parts of a recipe that don't fit together."""
    _check_duration(recipe)
    takes = recipe.algorithm.takes
    if other := next((part for part in recipe.data.parts if not isinstance(part, takes)), None):
        names = " or ".join(kind_name(kind) for kind in takes)
        is_in = "is" if other is recipe.data else "has a part of"
        raise ValueError(f"data {is_in} {kind_name(type(other))}, but {type(recipe.algorithm).__name__} takes {names}")
    compares = any(isinstance(role.loss, PairLoss) for role in recipe.algorithm.roles.values())
    if compares and any(isinstance(part, ScoredRows) for part in recipe.data.parts):
        raise ValueError(
            "data is scored, with one answer in a row, but algorithm.loss compares the two answers of a pair; set "
            "algorithm.loss=score_regression, or data.type=preference"
        )
    margins = [role.loss.margin for role in recipe.algorithm.roles.values() if isinstance(role.loss, BradleyTerry)]
    if any(margins) and any(
        isinstance(part, FileRows) and type(part).group is FileRows.group for part in recipe.data.parts
    ):
        raise ValueError(
            f"algorithm.loss.margin = {margins[0]!r} must be a score of the answers, and rows of whet have none: "
            "leave it out, or set Episode.scores in the group() of your rows"
        )
    if isinstance(recipe.data, TaskSet) and not recipe.data.grades:
        raise ValueError(
            f"data is {kind_name(type(recipe.data))}, which only poses tasks: define its grade() or make(), or choose "
            "data=reward_model with it as data.taskset"
        )
    if isinstance(recipe.algorithm, OnlineAlgorithm):
        _check_episodes(recipe, recipe.algorithm.group_size)
        _check_lengths(recipe)
        _check_sampling(recipe)
        _check_blend(recipe)
    groups, key = recipe.data.groups_per_step, "data.batch_size"
    if groups is None:
        groups, key = recipe.rollouts.prompts_per_step, "rollouts.prompts_per_step"
    if recipe.algorithm.minibatches > groups:
        raise ValueError(
            f"algorithm.minibatches = {recipe.algorithm.minibatches} is more than the "
            f"{key} = {groups} groups there are to split"
        )
    if problems := "\n".join(_problems_of_parts(recipe)):
        raise ValueError(problems)
    for name in recipe.policies:
        try:
            check_parts(recipe.of_policy(name))
        except ValueError as error:
            raise ValueError(f"policies.{name}: {error}") from None


def _problems_of_parts(recipe: "Recipe") -> Iterator[str]:
    """Yield the problems of each part with the parts that it depends on."""
    samples = isinstance(recipe.algorithm, OnlineAlgorithm)
    yield from recipe.learner.problems(recipe.parallel, recipe.model.lora is not None)
    yield from recipe.optimizer.problems(recipe.parallel, recipe.learner.type == "megatron")
    yield from _problems_of_lora(recipe)
    yield from _problems_of_vision(recipe, samples)
    yield from recipe.cluster.problems(recipe.parallel.ranks)
    yield from recipe.devices.problems(recipe.cluster, samples)
    if samples:
        yield from recipe.generator.problems(recipe.cluster, recipe.devices)
        yield from _problems_of_shared_nodes(recipe)
        yield from recipe.endpoint.problems()
        yield from recipe.evaluation.problems(recipe.sampling)
        yield from _problems_of_pausing(recipe)
        yield from _problems_of_replay(recipe)
        yield from _problems_of_scores(recipe)
    if recipe.policies:
        yield from problems_of_policies(recipe)
    yield from _problems_of_own_judges(recipe, samples)
    yield from recipe.weights.problems(recipe.generator if samples else None, recipe.model.lora, recipe.devices)
    if recipe.steps and (late := [step for step in recipe.profile.steps if step > recipe.steps]):
        yield f"profile.steps names step {late[0]}, but the run has {recipe.steps} steps"
    if recipe.algorithm.weighting == "constant" and isinstance(recipe.data, Rows) and recipe.data.longest is None:
        yield "algorithm.weighting = constant divides by the longest row there may be; set data.max_tokens"


def _problems_of_lora(recipe: "Recipe") -> Iterator[str]:
    lora = recipe.model.lora
    if lora is None:
        return
    for kind in ("dora", "experts", "quantize") if recipe.learner.type == "megatron" else ():
        if getattr(lora, kind):
            yield f"learner.type = megatron does not support model.lora.{kind}; leave it out, or set learner.type=torch"
    if lora.quantize and recipe.learner.compile:
        yield (
            f"model.lora.quantize = {lora.quantize} computes layers in a way that learner.compile = true can't "
            "compile; leave one of them out"
        )


def _problems_of_vision(recipe: "Recipe", samples: bool) -> Iterator[str]:
    if recipe.model.vision is None:
        return
    needs = {
        "generator.on_cluster": samples and recipe.generator.on_cluster,
        "weights.lora = adapter": samples and recipe.weights.lora == "adapter",
        "a second model in algorithm": any(isinstance(part, ModelConfig) for part in within(recipe.algorithm)),
    }
    if samples and recipe.generator.keeps_images and recipe.model.vision == "trained":
        yield (
            "model.vision = trained changes what the vision tower computes of an image, but servers of SGLang go on "
            "using what they have computed with older weights; set model.vision=frozen, or sample with vllm or torch"
        )
    settings = [name for name, is_set in needs.items() if is_set]
    if samples and (refused := recipe.generator.refuses_images) is not None:
        settings.append(refused)
    for setting in settings:
        yield (
            f"model.vision = {recipe.model.vision} reads images, which {setting} does not support; leave "
            "it out, use generator=torch or vllm, and an algorithm with one model, or leave model.vision out"
        )


def _problems_of_shared_nodes(recipe: "Recipe") -> Iterator[str]:
    engines, ranks = recipe.generator.replicas * recipe.generator.ranks, recipe.parallel.ranks
    if recipe.shares_nodes and engines > ranks:
        yield (
            "devices.placement = colocated with generator.on_cluster places each rank of an engine on the device of a "
            f"rank of the learner, but {recipe.generator.replicas} replicas have {engines} ranks and the learner has "
            f"{ranks}; lower generator.replicas, or leave generator.on_cluster or devices.placement out"
        )


def _problems_of_pausing(recipe: "Recipe") -> Iterator[str]:
    needs = {
        "rollouts.partial": recipe.rollouts.partial,
        "generator.replicas": recipe.generator.replicas > 1,
        "generator.on_cluster": recipe.generator.on_cluster,
        "devices.placement": recipe.devices.placement == "colocated",
    }
    for setting in (name for name, is_set in needs.items() if is_set and not recipe.generator.pauses):
        yield (
            f"{setting} needs an engine that pauses, and {type(recipe.generator).__name__}'s does not "
            "(pauses = False): leave the setting out, or write PausableEngine of whet/engines/base.py"
        )


def _problems_of_scores(recipe: "Recipe") -> Iterator[str]:
    """Yield the problem of each score that ``rewards`` or GDPO names, if a task set declares its scores without it."""
    data = recipe.data
    if not isinstance(data, TaskSet):
        return
    for part in data.of.values() if isinstance(data, Blend) else [Part(taskset=data)]:
        declared, rewards = part.taskset.score_names, part.rewards or recipe.rewards
        composed = () if rewards == Score() else ("graded", *(name for name, _ in rewards.named()))
        named = [("rewards", each.name, ("reward", *declared)) for each in within(rewards) if isinstance(each, Score)]
        shaped = ["overlong" for each in within(recipe.algorithm) if isinstance(each, OverlongShaping)]
        for advantage in within(recipe.algorithm):
            if isinstance(advantage, GDPOAdvantage):
                named += [("components of GDPO", name, (*declared, *composed, *shaped)) for name in advantage.weights]
        for setting, name, choices in named:
            if declared and name not in choices:
                kind, names = kind_name(type(part.taskset)), ", ".join(choices)
                yield f"{setting}: {kind} has no score {name!r}, only {names}.{did_you_mean(name, choices)}"


def _problems_of_own_judges(recipe: "Recipe", samples: bool) -> Iterator[str]:
    """Yield the problems of judges that are the policy."""
    judges, what = own_judges(recipe.data), "judge.model = policy asks the policy in the run's generator"
    if judges and not samples:
        yield f"{what}, and {type(recipe.algorithm).__name__} has none: name another model as the judge"
    if judges and recipe.validation.required:
        yield f"{what}, but validation.required grades answers before the run: leave it out, or name another judge"
    judges += own_judges(recipe.evaluation.sets)
    names = list(dict.fromkeys(judge.adapter for judge in judges if judge.adapter is not None))
    if names and not (recipe.generator.serves_adapters and recipe.weights.lora == "adapter" and recipe.model.lora):
        yield (
            f"judge.model = policy:{names[0]} asks the policy's model under another adapter, which needs "
            "generator=vllm, model.lora and weights.lora=adapter; set them, or name another judge"
        )
    elif wrong := next((name for name in names if name not in (BASE, *recipe.generator.adapter_names)), None):
        choices = (BASE, *recipe.generator.adapter_names)
        yield f"judge.model = policy:{wrong}: generator.adapters has no {wrong!r}.{did_you_mean(wrong, choices)}"
    by_logprobs = any(judge.verdict == "logprobs" for judge in judges)
    if by_logprobs and (setting := recipe.generator.refuses_likeliest):
        yield (
            f"{what}, of which judge.verdict = logprobs needs the log-probs of the choices; with {setting} the engine "
            "does not report them: change it, set judge.verdict=text, or name another model as the judge"
        )


def _problems_of_replay(recipe: "Recipe") -> Iterator[str]:
    if not recipe.rollouts.router_replay:
        return
    what = "rollouts.router_replay learns with the experts that the generator chose, which "
    if not recipe.generator.records_experts:
        yield f"{what}this generator does not report; set generator=torch, or leave it out"
    if max(recipe.parallel.tensor, recipe.parallel.pipeline) > 1:
        yield f"{what}do not reach layers that parallel.tensor or pipeline cuts; set both to 1, or leave it out"
    if recipe.learner.type == "megatron":
        yield f"{what}do not reach layers of learner.type = megatron; set learner.type=torch, or leave it out"


def _check_duration(recipe: "Recipe") -> None:
    if (recipe.steps > 0) == (recipe.epochs is not None):
        given = "both are given" if recipe.steps else "neither is given"
        raise ValueError(f"set steps (as in steps=100) or epochs (as in epochs=3): {given}")
    if recipe.epochs is None:
        return
    sampled = isinstance(recipe.algorithm, OnlineAlgorithm)
    reason = (
        "the tasks of a blend are drawn by the weights of its environments"
        if isinstance(recipe.data, Blend)
        else "rollouts.curriculum draws tasks by how often they are solved"
        if sampled and recipe.rollouts.curriculum
        else "rollouts.replay repeats the steps of another run"
        if sampled and recipe.rollouts.replay
        else None
    )
    if reason:
        raise ValueError(f"epochs can't be counted, because {reason}; set steps instead")


def _check_episodes(recipe: "Recipe", samples: int) -> None:
    rollouts = recipe.rollouts
    episodes = rollouts.prompts_per_step * samples * (rollouts.max_staleness + 1)
    if episodes > _MOST_EPISODES:
        ahead = f", {rollouts.max_staleness} steps ahead (rollouts.max_staleness)," if rollouts.max_staleness else ""
        raise ValueError(
            f"rollouts.prompts_per_step = {rollouts.prompts_per_step} times algorithm.group_size = {samples}{ahead} "
            f"are {episodes:,} episodes at once; at most {_MOST_EPISODES:,} are possible"
        )


def _check_lengths(recipe: "Recipe") -> None:
    sampling, advice = recipe.sampling, ""
    what = "sampling.max_prompt_tokens + sampling.max_new_tokens"
    if sampling.max_turns > 1:
        what = (
            "sampling.max_prompt_tokens + max_turns * max_new_tokens + (max_turns - 1) * max_observation_tokens"
            if sampling.max_episode_tokens is None
            else "sampling.max_episode_tokens"
        )
        advice = "; lower it, or set sampling.max_episode_tokens, where episodes are truncated"
    what += f" = {sampling.longest}"
    if sampling.longest > recipe.learner.max_tokens:
        micro = f"learner.max_tokens = {recipe.learner.max_tokens}"
        raise ValueError(f"{what} is more than a micro-batch holds, {micro}{advice}")
    if sampling.longest > recipe.generator.max_context:
        context = f"generator.max_context = {recipe.generator.max_context}"
        raise ValueError(f"{what} is more than the generator holds, {context}{advice}")
    for key, settings in recipe.evaluation.settings.items():
        longest = settings.sampling(sampling).longest
        if longest > recipe.generator.max_context:
            raise ValueError(
                f"with {key}.max_new_tokens = {settings.max_new_tokens} an episode may have {longest} tokens, more "
                f"than generator.max_context = {recipe.generator.max_context}, so its answers would be cut; lower the "
                "one or raise the other"
            )


def _check_sampling(recipe: "Recipe") -> None:
    sampling = recipe.sampling
    if reason := recipe.generator.cannot_sample(sampling.distribution):
        raise ValueError(reason)
    served = recipe.algorithm.served if isinstance(recipe.algorithm, TeacherAlgorithm) else ()
    if served and sampling.distribution != Distribution():
        raise ValueError(
            f"algorithm.teachers.{served[0]}.server: servers give log-probs at temperature 1 without filters; set "
            "sampling.temperature=1 and leave top_k, top_p and min_p out, or load the teacher without server"
        )
    if "topk_ids" in recipe.algorithm.reads and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        raise ValueError(
            "algorithm.loss compares the likeliest tokens of teacher and student, of which sampling.top_k, top_p "
            "and min_p would cut some off; leave them out, or choose algorithm.loss=on_policy_distillation"
        )


def _check_blend(recipe: "Recipe") -> None:
    if not isinstance(recipe.data, Blend):
        return
    if recipe.rollouts.curriculum is not None:
        raise ValueError("rollouts.curriculum is not read where data is a blend; set data.of.NAME.curriculum")
    for name, part in recipe.data.of.items():
        for problem in part.sampling.problems(recipe.sampling):
            raise ValueError(f"data.of.{name}.{problem}")
    if both := sorted(recipe.data.of.keys() & recipe.evaluation.sets.keys()):
        raise ValueError(f"evaluation.sets.{both[0]} has the name of an environment, which is evaluated anyway")


def kind_name(kind: type[Data]) -> str:
    """Return the name of a kind of data in recipes."""
    return "a task set" if kind is TaskSet else Component(TASK_SETS | ROWS).name_of(kind)
