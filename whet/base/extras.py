"""Packages that only some runs need. Each belongs to an extra of the distribution; where one is missing, the error is
one line that names the extra.

>>> with extra("lora", "model.lora"):
...     import peft
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from whet.base.errors import ConfigError

# What each extra is for, in the order in which ``whet doctor`` lists them.
EXTRAS = {
    "quickstart": "the built-in model",
    "tasks": "graders of mathematics, structure and instructions, judges, reasoning-gym, NeMo Gym and OpenEnv",
    "tools": "tools of a policy",
    "serve": "the OpenAI API for agents and whet serve",
    "lora": "LoRA",
    "data": "data sets of the Hugging Face Hub",
    "ray": "clusters",
    "tensorboard": "a sink of metrics",
    "wandb": "a sink of metrics",
    "torchao": "8-bit moments and float8",
    "vllm": "sampling with vLLM on GPUs",
}


class MissingExtraError(ConfigError):
    """A package is not installed, or cannot be imported, that a setting or command needs."""


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Import the packages of an extra inside. Raise ``MissingExtraError`` where one is missing; ``purpose`` is the
    setting or part that needs it."""
    try:
        yield
    except ImportError as error:
        raise missing(name, purpose, error) from error


def require(name: str, purpose: str, *modules: str) -> None:
    """Raise ``MissingExtraError`` where a module of an extra is not installed. Imports none of them."""
    for module in modules:
        if find_spec(module) is None:
            raise missing(name, purpose, ModuleNotFoundError(name=module))


def missing(name: str, purpose: str, error: ImportError) -> MissingExtraError:
    """Return the error for a failed import of a package of the extra ``name``."""
    absent = isinstance(error, ModuleNotFoundError) and error.name
    package = error.name.partition(".")[0] if absent and error.name else ""
    why = f"{package!r}, which is not installed" if package else f"a package that cannot be imported ({error})"
    return MissingExtraError(f"{purpose} needs {why}: pip install 'whet[{name}]'")
