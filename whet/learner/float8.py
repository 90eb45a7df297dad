"""Matrix products of layers in float8 (arXiv 2209.05433), with torchao, rescaled for each tensor, forward and
backward."""

import torch
from torch import nn

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.models.attention.forest import decoder_of
from whet.models.stages import layers_of

_ROUTERS = ("gate", "router")  # routers of experts are small and sensitive to rounding


def use_float8(model: nn.Module, device: torch.device, *, emulate: bool = False) -> int:
    """Replace the linear maps of a model's layers, in place; their weights and names stay. Embeddings, head, experts
    and routers are unchanged. Return the number of replaced maps. ``emulate``: compute with rounded wider numbers, on
    any device, for tests. Raises ``ConfigError`` if the device doesn't support float8 or torchao is missing."""
    if not emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(
            "learner.float8 = true needs a GPU that supports float8 (compute capability 8.9 or more: Ada, Hopper and "
            f"later), but the learner computes on {device}; leave it out"
        )
    with extra("torchao", "learner.float8=true"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    layers = layers_of(decoder_of(model))[1]
    convert_to_float8_training(
        layers, module_filter_fn=_fits, config=Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    )
    return sum(isinstance(module, Float8Linear) for module in layers.modules())


def _fits(module: nn.Module, name: str) -> bool:
    """Return whether the kernel supports the module: sizes must be multiples of 16, except for the number of tokens,
    which is padded."""
    if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0
