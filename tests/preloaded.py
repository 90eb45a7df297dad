"""Everything that programs and children of the tests import, so that a fork of the process that has imported this
starts at once. What an extra brings is imported if it is installed."""

import gc
from contextlib import suppress

import tests.parallel.cases
import whet.run.run
from whet.base.errors import ConfigError
from whet.tasks.adapters import reasoning_gym
from whet.tasks.instructions.checks import registry
from whet.tasks.math import grader

__all__ = ["tests", "whet"]

with suppress(ImportError):
    import peft  # noqa: F401
for prepare in (grader.prepare, registry, reasoning_gym.prepare):
    with suppress(ImportError, ConfigError):
        prepare()
gc.collect()
gc.freeze()  # a collection in a fork would look at all that was imported, and copy its memory
