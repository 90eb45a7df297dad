"""``torch.compile`` for each layer of a decoder, to fuse its many small operations. Forest attention is not compiled
(``torch.compiler.disable``): its shapes differ from batch to batch, and its products are fast already. So a layer
becomes four graphs; they are separated by products, across which nothing would have been fused."""

import importlib.util
import os
import shutil

import torch
from torch import nn

from whet.base.errors import ConfigError
from whet.models.attention.forest import decoder_of
from whet.models.moe.experts import experts_of
from whet.models.stages import layers_of


def compile_layers(model: nn.Module, device: torch.device) -> int:
    """Compile the layers in place; the names of parameters stay, and each kind of part is compiled at its first use,
    once for all layers and lengths. Return the number of parts. Raises ``ConfigError`` if nothing can be compiled: no
    compiler, or a model without plain layers."""
    compiler = os.environ.get("CXX", "g++")  # as torch chooses it
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"learner.compile=true needs a C++ compiler here, and {compiler} was not found: install it, name "
            "another one in the environment variable CXX, or leave learner.compile out"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("learner.compile=true needs triton on a GPU, but it is not installed: pip install triton")
    parts = [part for layer in layers_of(decoder_of(model))[1] for part in _parts(layer)]
    if not parts:
        raise ConfigError(
            f"learner.compile=true has nothing to compile in {type(model).__name__}; leave learner.compile out"
        )
    # The limit applies to the variants of all parts together: with and without gradients, of policy and reference.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=True)
    return len(parts)


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Return the layer, or its parts that can be compiled."""
    return [part for part in ([layer] if _whole(layer) else layer.children()) if _whole(part)]


def _whole(part: nn.Module) -> bool:
    """Return whether the whole part can be compiled. Experts can't be, because the number of tokens of each differs
    from batch to batch, nor can modules that FSDP gathers separately, because their hooks can't be compiled (FSDP gives
    them a method ``unshard``). The part's own hooks are outside of the compiled function."""
    return not any(experts_of(part)) and not any(hasattr(m, "unshard") for m in part.modules() if m is not part)
