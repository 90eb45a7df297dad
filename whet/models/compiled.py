"""``torch.compile`` for what surrounds attention in each layer: norms and feed-forward parts, whose many small
operations it fuses. Attention over a forest stays as it is: its shapes differ from batch to batch, and its products are
fast already."""

import importlib.util
import os
import shutil

import torch
from torch import nn

from whet.errors import ConfigError
from whet.models.experts import experts_of
from whet.models.forest_attention import decoder_of
from whet.models.stages import layers_of

_FEED_FORWARD = ("mlp", "feed_forward", "ffn")


def compile_layers(model: nn.Module, device: torch.device) -> int:
    """In place; the names of parameters stay, and each kind of part is compiled at its first use, once for all layers
    and lengths. Returns how many parts there are. Raises ``ConfigError`` where nothing can be compiled: no compiler, or
    a model without plain layers."""
    compiler = os.environ.get("CXX", "g++")  # as torch chooses it
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"learner.compile=true needs a C++ compiler here, and {compiler} was not found: install it, name "
            "another one in the environment variable CXX, or leave learner.compile out"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("learner.compile=true needs triton on a GPU, and it is not installed: pip install triton")
    parts = [part for layer in layers_of(decoder_of(model))[1] for part in _around_attention(layer)]
    if not parts:
        raise ConfigError(
            f"learner.compile=true found nothing to compile in {type(model).__name__}; leave learner.compile out"
        )
    # It counts variants over all parts together: with and without gradients, of the policy and of its reference.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for part in parts:
        part.compile(dynamic=True)
    return len(parts)


def _around_attention(layer: nn.Module) -> list[nn.Module]:
    """Norms and feed-forward parts, by the names that they have in transformers. Left alone are experts, because how
    many tokens each gets differs from batch to batch, and norms that FSDP gathers by themselves, because its hooks
    can't be compiled (it gives what it gathers a method ``unshard``)."""
    named = [part for name, part in layer.named_children() if "norm" in name or name in _FEED_FORWARD]
    return [part for part in named if not any(experts_of(part)) and not hasattr(part, "unshard")]
