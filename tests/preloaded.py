"""Everything that programs and children of the tests import, so that a fork of the process that has imported this
starts at once. What an extra brings is imported if it is installed."""

import gc
from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules

import rich.live

import tests.parallel.cases
import whet.algorithms
import whet.api
import whet.checkpoint
import whet.cli.main
import whet.engines.torch
import whet.launch
import whet.parallel.megatron
import whet.run.run
import whet.show
from whet.base.errors import ConfigError
from whet.base.extras import without
from whet.tasks.adapters import reasoning_gym
from whet.tasks.instructions.checks import registry
from whet.tasks.math import grader

__all__ = ["rich", "tests", "whet"]

# What commands import only when they need it.
for package in (
    whet.algorithms,
    whet.checkpoint,
    whet.engines.torch,
    whet.launch,
    whet.parallel.megatron,
    whet.run,
    whet.show,
):
    for module in iter_modules(package.__path__, f"{package.__name__}."):
        with suppress(ImportError), without("wandb"):
            import_module(module.name)

with suppress(ImportError):
    import jsonschema  # noqa: F401  # in workers, whose limit of memory such a large fork may have reached
    import peft  # noqa: F401
for prepare in (grader.prepare, registry, reasoning_gym.prepare):
    with suppress(ImportError, ConfigError):
        prepare()
gc.collect()
gc.freeze()  # a collection in a fork would look at all that was imported, and copy its memory
