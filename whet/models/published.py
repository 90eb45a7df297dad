"""The layout of weights in the published files of a model, where it differs from transformers' modules."""

from torch import Tensor

from whet.base.errors import WhetError

TRANSPOSED = {"qwen3_vl_moe": (".experts.gate_up_proj", ".experts.down_proj")}
"""The ends of the names of weights that files of a type of model have as [experts, inputs, outputs], and modules as
[experts, outputs, inputs]."""


def as_published(model_type: str, name: str, tensor: Tensor) -> Tensor:
    """Return a weight as the published files of its model have it, which vLLM reads. transformers reads both layouts by
    their shapes; so this raises ``WhetError`` for square matrices, which no published model has."""
    if not name.endswith(TRANSPOSED.get(model_type, ())):
        return tensor
    if tensor.shape[-2] == tensor.shape[-1]:
        raise WhetError(
            f"{name} has square matrices, {list(tensor.shape)}: transformers could not tell whether a file of "
            f"{model_type} has them transposed, so they can't be written; choose other sizes for the model"
        )
    return tensor.mT
