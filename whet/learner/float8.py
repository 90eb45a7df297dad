"""Products of layers in float8 (arXiv 2209.05433), by torchao: scaled anew for each tensor, forward and backward."""

import torch
from torch import nn

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.models.attention.forest import decoder_of
from whet.models.stages import layers_of

_ROUTERS = ("gate", "router")  # of experts: few numbers, which decide much


def use_float8(model: nn.Module, device: torch.device, *, emulate: bool = False) -> int:
    """Swap the linear maps of a model's layers, in place; their weights, and what they are called, stay. Embeddings,
    head, experts and routers stay as they are. Returns how many were swapped. ``emulate``: compute on wide numbers
    that were rounded, on any device, for tests. Raises ``ConfigError`` where the device or torchao is missing."""
    if not emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(
            "learner.float8 = true needs a GPU that multiplies float8 (compute capability 8.9 or more: Ada, Hopper and "
            f"later), and the learner computes on {device}; leave it out"
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
    """The kernel takes sizes that are multiples of 16; that of tokens is padded."""
    if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0
