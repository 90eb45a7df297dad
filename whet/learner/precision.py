"""The precision of a learner's computations, also matrix products of layers in float8 (arXiv 2209.05433), with torchao,
rescaled for each tensor, forward and backward."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.learner.config import LearnerConfig, MatmulPrecision, Precision, WorkerConfig
from whet.models.attention.forest import decoder_of
from whet.models.loading import load_model_config
from whet.models.precision import autocast_modules, choose_precision
from whet.models.rates import fastest_matmul_precision
from whet.models.stages import layers_of
from whet.parallel.mesh import Ranks


def weight_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype in which weights are stored."""
    return torch.float64 if precision == "float64" else torch.float32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context of a forward pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def with_precision(config: WorkerConfig, device: torch.device, ranks: Ranks | None) -> WorkerConfig:
    """Return the config with ``auto`` resolved to the precision on the first rank's device. A run has resolved it
    before."""
    if config.learner.precision != "auto":
        return config
    fastest = choose_precision(load_model_config(config.model), device.type).precision
    chosen = config.learner.fastest(fastest, device.type)
    if ranks is not None:
        chosen = ranks.broadcast(chosen)
    return config.model_copy(update={"learner": config.learner.model_copy(update={"precision": chosen})})


def set_matmul_precision(learner: LearnerConfig, device: torch.device, ranks: Ranks | None) -> str:
    """Set torch's precision of products in float32 to the first rank's choice, and return it."""
    chosen = choose_matmul_precision(learner.matmul_precision, learner.computes_in, device)
    if ranks is not None:
        chosen = ranks.broadcast(chosen)
    torch.set_float32_matmul_precision(chosen)
    return chosen


def choose_matmul_precision(setting: MatmulPrecision, precision: Precision, device: torch.device) -> str:
    """Return ``highest`` or ``medium`` (torch.set_float32_matmul_precision). ``auto`` measures on a CPU in float32, and
    is ``highest`` otherwise.

    The setting is global to the process, so the measurement is shared by all its learners.
    """
    if setting != "auto":
        return setting
    return fastest_matmul_precision() if device.type == "cpu" and precision == "float32" else "highest"


def keep_in_bfloat16(model: nn.Module, precision: Precision) -> None:
    """Store frozen linear layers and experts, of a whole model or under LoRA, in bfloat16 if autocast would round them
    to it anyway: half the memory, bit-identical results, and no cast in every pass. Everything else, including the
    head, is unchanged."""
    if precision != "bfloat16":
        return
    head = model.get_output_embeddings()  # type: ignore[operator]
    for module in autocast_modules(model):
        if module is not head and not any(parameter.requires_grad for parameter in module.parameters()):
            module.to(torch.bfloat16)


def bf16_residual_stream(model: nn.Module) -> None:
    """Keep hidden states between layers, and the outputs of norms, in bfloat16 too, as engines do: half the memory and
    traffic of everything except matrix products. Weights and their gradients are unchanged. Call it once."""
    decoder = decoder_of(model)
    decoder.get_input_embeddings().register_forward_hook(_in_bfloat16)
    for module in decoder.modules():
        if type(module).__name__.endswith("Norm"):  # a float32 weight would make the result float32
            module.register_forward_hook(_in_input_dtype)


def _in_bfloat16(module: nn.Module, inputs: tuple[object, ...], out: Tensor) -> Tensor:
    return out.to(torch.bfloat16)


def _in_input_dtype(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    return out.to(inputs[0].dtype)


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
