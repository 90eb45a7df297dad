"""Measures of a step that come from its clock and its batch rather than from a loss: shares of time, throughput, and a
profile of the learner."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from whet.core.batch import Batch
from whet.learner.base import Learner
from whet.learner.config import ProfileConfig
from whet.metrics.clock import Pace, Timing

log = logging.getLogger(__name__)


def split_generation(lap: dict[str, float], timing: Timing) -> None:
    """Divide ``time/generate`` into ``time/generate`` and ``time/grade``. Episodes overlap, so that the phase's seconds
    are divided as the episodes' waiting was."""
    if waited := timing.generating + timing.grading:
        lap["time/grade"] = lap.get("time/generate", 0.0) * timing.grading / waited
        lap["time/generate"] = lap.get("time/generate", 0.0) - lap["time/grade"]


def idle_shares(lap: dict[str, float], timing: Timing, shared: bool) -> dict[str, float]:
    """Return the shares of the step in which the learner waited and in which nothing was sampled. ``shared``: the
    generator sleeps while the learner computes."""
    if not timing.passed:
        return {}
    learner_waits = lap.get("time/generate", 0.0)
    alone = learner_waits if shared else timing.passed
    return {
        "idle/learner": learner_waits / lap["time/step"],
        "idle/generator": max(0.0, 1 - min(timing.sampling, alone) / timing.passed),
    }


def batch_values(batch: Batch) -> dict[str, float]:
    """Return the size of the batch, and the share of its tokens whose experts were recorded."""
    values: dict[str, float] = {"batch/tokens": len(batch)}
    if batch.experts is not None:
        values["experts/replayed"] = float((batch.experts[:, 0, 0] >= 0).double().mean())
    return values


def throughput(pace: Pace, steps_left: int) -> dict[str, float]:
    """Return tokens per second and seconds to go, from the last steps."""
    return {"time/tokens_per_second": pace.tokens_per_second(), "time/eta": pace.eta(steps_left) or 0.0}


@asynccontextmanager
async def profiled(config: ProfileConfig, learner: Learner, folder: Path, step: int) -> AsyncIterator[None]:
    """Profile the learner inside the block, if the settings name the step."""
    if step not in config.steps:
        yield
        return
    await learner.begin_profile(config.micro_batches)
    yield
    path = folder / "profile" / f"step-{step:06d}.json.gz"
    await learner.end_profile(path)
    log.info("the profile of step %d is in %s; open it at https://ui.perfetto.dev", step, path)
