"""Optional packages. Each belongs to an extra of the distribution; if one is missing, the error names the extra.

>>> with extra("lora", "model.lora"):
...     import peft
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from whet.base.errors import ConfigError

# The purpose of each extra, in the order of ``whet doctor``.
EXTRAS = {
    "quickstart": "the built-in model",
    "tasks": "graders of mathematics, structure and instructions, judges, reasoning-gym, NeMo Gym and OpenEnv",
    "tools": "tools of a policy",
    "serve": "the OpenAI API for agents, whet serve and whet watch",
    "lora": "LoRA",
    "qlora": "LoRA on a model in 4 bits",
    "data": "Parquet and Arrow files, data sets of the Hugging Face Hub, near duplicates",
    "images": "models, rows and tasks with images",
    "ray": "clusters",
    "tensorboard": "a sink of metrics",
    "wandb": "a sink of metrics",
    "prometheus": "a sink of metrics",
    "mlflow": "a sink of metrics",
    "trackio": "a sink of metrics",
    "swanlab": "a sink of metrics",
    "torchao": "8-bit moments and float8",
    "megatron": "learning with Megatron Core's layers",
    "vllm": "sampling with vLLM on GPUs",
}


class MissingExtraError(ConfigError):
    """A package that a setting or command needs is not installed or can't be imported."""


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Raise ``MissingExtraError`` if an import of the extra's packages inside the block fails. ``purpose``: the setting
    or part that needs them."""
    if name in ("lora", "qlora"):  # bitsandbytes, which PEFT imports, notes that a product is missing that isn't used
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        yield
    except ImportError as error:
        raise missing(name, purpose, error) from error


@contextmanager
def without(package: str) -> Iterator[None]:
    """Inside, imports of others take an optional package for missing, unless it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(package, None)


def require(name: str, purpose: str, *modules: str) -> None:
    """Raise ``MissingExtraError`` if a module of an extra is not installed. Imports nothing."""
    for module in modules:
        if find_spec(module) is None:
            raise missing(name, purpose, ModuleNotFoundError(name=module))


def names_extra(message: str) -> bool:
    """Return whether an error's message says that an extra is missing."""
    return "pip install 'whet[" in message


def missing(name: str, purpose: str, error: ImportError) -> MissingExtraError:
    """Return the error for a failed import of a package of the extra ``name``."""
    absent = isinstance(error, ModuleNotFoundError) and error.name
    package = error.name.partition(".")[0] if absent and error.name else ""
    why = f"{package!r}, which is not installed" if package else f"a package that cannot be imported ({error})"
    return MissingExtraError(f"{purpose} needs {why}: pip install 'whet[{name}]'")
