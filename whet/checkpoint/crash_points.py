"""Named places where a test can kill the process, as a power cut would: no handler runs, nothing is flushed.

``WHET_CRASH_AT=checkpoint.before_rename`` kills this process there with SIGKILL; ``checkpoint.before_rename:3`` the
third time it comes by. Without the variable a crash point does nothing.
"""

import os
import signal

from whet.base.errors import ConfigError

VARIABLE = "WHET_CRASH_AT"

CRASH_POINTS: dict[str, str] = {
    "step.generated": "a step's rollouts are sampled, nothing is learned from them yet",
    "step.updated": "the weights have changed, the generator does not have them yet",
    "step.published": "the generator has the new weights",
    "step.logged": "the step's metrics and rollouts are written, nothing is evaluated or saved yet",
    "step.copied": "the copy that an asynchronous checkpoint is written from is taken, and being written",
    "step.done": "all of the step is on disk, except an asynchronous checkpoint",
    "checkpoint.staged": "the staging folder exists and is empty",
    "checkpoint.half_written": "the learner's files are written, not flushed; state.json is missing",
    "checkpoint.before_manifest": "every file is flushed, the manifest is missing",
    "checkpoint.before_rename": "the staging folder is complete",
    "checkpoint.mid_replace": "the older checkpoint of the same step is moved aside, the new one not yet in its place",
    "checkpoint.after_rename": "the checkpoint has its final name, which is not flushed",
    "checkpoint.before_pointer": "'latest' still names the one before",
    "checkpoint.before_prune": "'latest' names the new checkpoint",
    "checkpoint.mid_prune": "a checkpoint to be removed has lost its name, but not its files",
}
"""Every name, with the state of things there."""

_visits: dict[str, int] = {}


def crash_point(name: str) -> None:
    """Kill this process if the environment says so. Raises ``KeyError`` for a name that is not registered,
    ``ConfigError`` where the variable holds an unknown name or a bad count."""
    if name not in CRASH_POINTS:
        raise KeyError(f"crash point {name!r} is not in CRASH_POINTS")
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    place, _, count = wanted.partition(":")
    if place not in CRASH_POINTS or not (count or "1").isdecimal() or count == "0":
        known = ", ".join(CRASH_POINTS)
        raise ConfigError(f"{VARIABLE}={wanted}: expected NAME or NAME:COUNT, counted from 1. Names: {known}")
    if place == name:
        _visits[name] = _visits.get(name, 0) + 1
        if _visits[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
