"""The last check after a refit: the log-probs of the generator's decode path, compared with the learner's."""

import torch
from torch import Tensor

from whet.base.errors import RefitError
from whet.core.batch import Batch
from whet.core.types import Distribution, Episode, Group, Span, Task, Trajectory
from whet.learner.base import Learner
from whet.metrics import Metrics
from whet.processes.compute import compute
from whet.weights.config import RefitConfig


async def compare_decoding(
    learner: Learner,
    prompt: list[int],
    tokens: list[int],
    decoded: list[float],
    config: RefitConfig,
    dtype: torch.dtype,
    distribution: Distribution | None = None,
) -> Metrics:
    """Compare log-probs. ``decoded`` are the generator's log-probs of ``tokens`` after ``prompt``, under
    ``distribution`` (by default the unmodified model's). ``dtype`` is the generator's. Raises ``RefitError`` beyond the
    config's tolerance."""
    batch = await compute(_batch, prompt, tokens, distribution or Distribution())
    scored = (await learner.score(batch, {"logprobs"}))["logprobs"]
    if not await compute(_is_finite, scored):
        raise RefitError(
            "the learner's log-probs are not finite after its last optimizer step, so its weights have NaN or infinite "
            "numbers; lower optimizer.lr, and resume from the last checkpoint"
        )
    mean, largest = await compute(_difference, batch, scored, decoded)
    coarse = dtype in (torch.bfloat16, torch.float16) or learner.facts.precision == "bfloat16"
    tolerance = config.probe_tolerance or (0.25 if coarse else 1e-3)
    if not mean <= tolerance:
        raise RefitError(
            f"after publishing, the generator's decode path gives different log-probs than the learner: they differ by "
            f"{mean:.3g} on average over {len(tokens)} tokens (weights.probe_tolerance {tolerance:g}). Stale "
            "caches, another precision, or a head that is not tied as in the learner are the usual causes"
        )
    return Metrics().mean("refit/probe_mean", mean).max("refit/probe_max", largest)


def _batch(prompt: list[int], tokens: list[int], distribution: Distribution) -> Batch:
    spans = [Span(prompt, trained=False), Span(tokens, trained=True)]
    return Batch.from_groups(
        [Group("probe", Task("probe", []), [Episode([Trajectory(spans)])])], distribution=distribution
    )


def _is_finite(scored: Tensor) -> bool:
    return bool(scored.isfinite().all())


def _difference(batch: Batch, scored: Tensor, decoded: list[float]) -> tuple[float, float]:
    """Return the mean and the largest absolute difference of log-probs."""
    difference = (torch.tensor(decoded, dtype=torch.float64) - scored[batch.trained].double()).abs()
    return float(difference.mean()), float(difference.max())
