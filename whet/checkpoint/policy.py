"""Loading the policy of a checkpoint: its tensors are copied into the model that the recipe names."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.checkpoint.manifest import CheckpointError
from whet.checkpoint.store import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from whet.models.config import ModelConfig


def load_policy(checkpoint: Checkpoint, config: "ModelConfig") -> Any:
    """Return the checkpoint's policy on the CPU in float32 (a ``PreTrainedModel``, or a ``PeftModel`` where LoRA was
    trained). Raises ``CheckpointError`` where its tensors are not those of the model."""
    import torch

    from whet.learner.state import load_weights
    from whet.models.loading import load_model

    path = checkpoint.folder / "policy"
    if not path.is_dir():
        raise CheckpointError(f"{checkpoint.folder} holds no policy")
    model: Any = load_model(config, dtype=torch.float32, train=True)
    copy_into(model, load_weights(path), path, partial=config.lora is not None)
    return model.eval()


def copy_into(model: Any, tensors: "Mapping[str, Tensor]", path: Path, *, partial: bool) -> None:
    """Copy tensors by name into ``model``. Frozen ones (``partial``) and those tied to a copied one may be missing."""
    import torch

    from whet.models.fit import match

    own = model.state_dict()
    copied = {own[name].data_ptr() for name in tensors if name in own}
    needed = {name for name, p in model.named_parameters() if p.requires_grad} if partial else own.keys()
    wanted = {name: t for name, t in own.items() if name in needed and t.data_ptr() not in copied}
    if mismatch := match(tensors, wanted | {name: own[name] for name in tensors if name in own}, types=False):
        raise CheckpointError(f"{path} does not fit the model that the run's recipe names: {mismatch}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
