"""The agreement of generator and learner, measured before the first step with the parts of the recipe: the weights are
published with all checks on, a few answers are sampled, and the learner scores them. If the log-probs differ, further
scoring finds the likely cause. Trains nothing and writes nothing.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from whet.base.closing import Closing
from whet.base.errors import RefitError
from whet.base.scratch import Scratch
from whet.core.batch import Batch
from whet.core.types import Distribution, Group
from whet.losses.off_policy import MISMATCH, mismatch, mismatch_metrics
from whet.processes.compute import compute
from whet.run.build import build_renderer, open_cluster, open_learners
from whet.run.feed import SampledFeed
from whet.run.machine import decide
from whet.run.policy import Policy

if TYPE_CHECKING:
    from whet.learner.base import Scorer
    from whet.run.recipe import Recipe

_TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
_ENDS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


@dataclass(slots=True)
class Agreement:
    """The result. ``error`` is 1 if both agree bit for bit, nan if publishing the weights failed."""

    error: float
    largest: float  # of |lp_learner - lp_generator|
    tokens: int
    stopped: float  # share of the answers that were not truncated
    cause: str | None = None  # with what to do; None below the alarm

    @property
    def agrees(self) -> bool:
        return self.cause is None


async def measure_agreement(recipe: "Recipe", prompts: int = 4) -> Agreement:
    """Sample and score one group for each of ``prompts`` tasks. Raises the error of a part that can't be built."""
    recipe, _ = await compute(decide, recipe)
    weights = recipe.weights.model_copy(update={"digest": True, "probe": True})
    rollouts = recipe.rollouts.model_copy(update={"prompts_per_step": prompts, "max_staleness": 0})
    recipe = recipe.model_copy(update={"weights": weights, "rollouts": rollouts})
    async with Closing() as closing:
        scratch = closing.enter_context(Scratch("doctor"))
        renderer = build_renderer(recipe)
        cluster = await closing.enter_async_context(open_cluster(recipe))
        feed = SampledFeed(recipe, renderer, filters=(), cluster=cluster)  # all answers, without reward filters
        closing.closes("the feed", feed.close)
        learners = await closing.enter_async_context(open_learners(recipe, scratch, cluster))
        trained = recipe.algorithm.losses
        policy = Policy(renderer, learners, trained, feed.devices, feed.distribution, feed.sampler)
        try:
            await policy.publish(0)
        except RefitError as error:
            return Agreement(float("nan"), float("nan"), 0, 0.0, _of_weights(error))
        async with feed.source as source:
            groups = await source.next_groups()
        return await compare(groups, learners["policy"], recipe)


async def compare(groups: list[Group], learner: "Scorer", recipe: "Recipe") -> Agreement:
    """Have the learner score sampled groups, and find the cause if its log-probs differ."""
    shared = learner.facts.forest
    layout = partial(Batch.from_groups, share_prompts=shared, distribution=recipe.sampling.distribution)
    batch: Batch = await compute(layout, groups)
    errors = await _errors(batch, learner)
    result = Agreement(errors["error"], errors["largest"], *await compute(_counts, batch))
    if errors["error"] > recipe.rollouts.mismatch_alarm:
        result.cause = await _cause(batch, learner, recipe, errors)
    return result


async def _errors(batch: Batch, learner: "Scorer") -> dict[str, float]:
    logprobs = (await learner.score(batch, {"logprobs"}))["logprobs"]
    return await compute(_errors_of, logprobs, batch)


def _counts(batch: Batch) -> tuple[int, float]:
    """Return the number of trained tokens, and the share of answers that were not truncated."""
    return int(batch.trained.sum()), 1.0 - float(batch.truncated.double().mean())


def _errors_of(logprobs: Tensor, batch: Batch) -> dict[str, float]:
    metrics = mismatch_metrics(replace(batch, old_logprobs=logprobs)).result()
    trained = mismatch(logprobs, batch.column("rollout_logprobs"), batch)[batch.trained]
    return {
        "error": metrics[MISMATCH],
        "largest": metrics["mismatch/max"],
        "bias": abs(float(trained.mean())) / max(float(trained.abs().mean()), 1e-12),
    }


async def _cause(batch: Batch, learner: "Scorer", recipe: "Recipe", errors: dict[str, float]) -> str:
    """Return the explanation that accounts for most of the difference."""
    current = batch.distribution
    causes: list[tuple[Distribution, str]] = [
        (
            replace(current, temperature=other),
            f"temperature: the generator's log-probs fit temperature {other:g}, but the recipe samples at "
            f"{current.temperature:g}; the generator must report log-probs of the distribution that it samples from",
        )
        for other in _TEMPERATURES
        if other != current.temperature
    ]
    whole = replace(current, top_k=0, top_p=1.0, min_p=0.0)
    if whole != current:
        text = "truncation: the generator's log-probs fit the whole vocabulary, but the recipe truncates it "
        causes.append((whole, text + "(sampling.top_k, sampling.top_p, sampling.min_p)"))
    left = [(await _errors(replace(batch, distribution=other), learner))["error"] for other, _ in causes]
    best = min(range(len(causes)), key=left.__getitem__)
    if left[best] - 1 < (errors["error"] - 1) / 3:
        return causes[best][1]
    dtype = recipe.generator.dtype
    if "bfloat16" in (dtype, recipe.learner.precision) and errors["bias"] < 0.5:
        return (
            f"precision: the generator computes in {dtype}, the learner in {recipe.learner.precision}, and the "
            "differences have no bias; use the same precision or float32, or correct with algorithm.loss.correction=tis"
        )
    return (
        "the models differ: the same weights give other log-probs. Compare the two implementations (position encoding, "
        "soft caps, attention windows, tied embeddings) with generator.dtype=float32 and learner.precision=float32"
    )


def _of_weights(error: RefitError) -> str:
    if error.tensors and all(any(end in name for end in _ENDS) for name in error.tensors):
        return f"tied embeddings: the generator's head or embedding differs from the learner's. {error}"
    return f"stale or damaged weights: {error}"
