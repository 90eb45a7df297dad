"""Weights in another precision. float16 ends at 65,504: a larger number would become infinite."""

from typing import TYPE_CHECKING

from whet.base.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def cast_model(model: "PreTrainedModel", dtype: "torch.dtype") -> "PreTrainedModel":
    """Return the model with its weights in ``dtype``. Raises ``ConfigError`` if a weight is too large for it."""
    for name, tensor in model.state_dict().items():
        check_range(name, tensor, dtype)
    return model.to(dtype)


def check_range(name: str, tensor: "torch.Tensor", dtype: "torch.dtype", levels: int = 1) -> None:
    """Raise ``ConfigError`` if a finite number of the tensor would be infinite in ``dtype``, or as one of ``levels``
    multiples of a scale in ``dtype``."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    for extreme in tensor.detach().aminmax():
        if extreme.isfinite() and (extreme / levels).to(dtype).isinf():
            kind = str(dtype).removeprefix("torch.") + (" scales" if levels > 1 else "")
            raise ConfigError(
                f"the weight {name} has the value {extreme.item():.6g}, which is too large for {kind}; write bfloat16 "
                "or float32"
            )
