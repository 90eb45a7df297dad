"""Alarms: what a person who watches a run should look at now. The rules are simple and stated in each text."""

import math
from typing import Literal

import numpy as np

from whet.show.charts import present
from whet.show.history import Floats, History
from whet.show.metric_catalog import ENTRIES, duration, show

State = Literal["running", "finished", "stopped", "gone"]
Alarm = tuple[str, str]  # what, and why

WINDOW = 20  # steps over which means are taken
_STALLED, _PATIENCE = 10, 60.0  # times the median step, and at least these seconds
_GRADIENT = 10  # times the median gradient norm


def alarms(history: History, state: State, steps: int | None, now: float) -> list[Alarm]:
    """Return the alarms of a run. ``steps`` is its planned number; ``now`` is the time in Unix seconds."""
    raised: list[Alarm] = []
    train = history.train
    done = int(train.steps[-1]) if len(train) else 0
    if state == "stopped":
        planned = f" of {steps}" if steps else ""
        raised.append(("stopped", f"no process trains this run any more; it ended at step {done}{planned}"))
    if state == "gone":
        raised.append(("gone", "the run folder can't be read any more; the page shows what was read before"))
    if state == "running":
        raised += _stalled(history, now)
    raised += _fallen(present(train.column("reward/mean")))
    raised += _diverged(present(train.column("kl"))[-WINDOW:])
    raised += _exploded(present(train.column("gradient_norm")))
    failed = int(np.nansum(train.column("checkpoint/mirror_failed")[-WINDOW:]))
    if failed:
        text = f"{failed} checkpoints of the last {WINDOW} steps are not in checkpoints.mirror; read log.txt"
        raised.append(("the mirror fails", text))
    skipped = int(np.nansum(train.column("learner/skipped")[-WINDOW:]))
    if skipped:
        text = f"the loss or the gradient was not finite in {skipped} of the last {WINDOW} steps; read log.txt"
        raised.append(("steps are skipped", text))
    for key in ("loss", "reward/mean", "gradient_norm"):
        broken = int(np.isinf(train.column(key)[-WINDOW:]).sum())
        if broken:
            raised.append((f"{ENTRIES[key].label} is not finite", f"in {broken} of the last {WINDOW} steps"))
    return raised


def _stalled(history: History, now: float) -> list[Alarm]:
    durations = present(history.train.column("time/step"))
    written = present(history.train.column("time/written"))
    if not len(durations) or not len(written):
        return []
    median, waited = float(np.median(durations[-50:])), now - float(written[-1])
    if waited <= max(_PATIENCE, _STALLED * median):
        return []
    text = f"no step for {duration(waited)}, more than {_STALLED} times the median step of {duration(median)}"
    return [("stalled", text)]


def _fallen(rewards: Floats) -> list[Alarm]:
    """The reward has lost half of what it had gained, and more than chance explains."""
    rewards = rewards[np.isfinite(rewards)]
    if len(rewards) < 2 * WINDOW:
        return []
    sums = np.cumsum([0.0, *rewards])
    means = (sums[WINDOW:] - sums[:-WINDOW]) / WINDOW
    best = int(means.argmax())
    fall = means[best] - means[-1]
    noise = 2 * math.sqrt(2 / WINDOW) * float(rewards[best : best + WINDOW].std())
    if fall <= max(noise, 1e-9) or fall <= (means[best] - means[0]) / 2:
        return []
    text = f"its mean over {WINDOW} steps was {show(means[best])} and is now {show(means[-1])}"
    return [("the reward has fallen", text)]


def _diverged(kl: Floats) -> list[Alarm]:
    bound = ENTRIES["kl"].high
    finite = kl[np.isfinite(kl)]
    if bound is None or len(finite) < WINDOW or finite.mean() <= bound:
        return []
    return [
        ("the KL divergence is high", f"its mean over {WINDOW} steps is {show(finite.mean())}, above {show(bound)}")
    ]


def _exploded(norms: Floats) -> list[Alarm]:
    norms = norms[np.isfinite(norms)]
    if len(norms) < 2 * WINDOW:
        return []
    median, now = float(np.median(norms)), float(norms[-5:].mean())
    if now <= _GRADIENT * median:
        return []
    text = f"its mean over 5 steps is {show(now)}, more than {_GRADIENT} times the median of {show(median)}"
    return [("the gradient norm has grown", text)]
