"""Loads the policy of a checkpoint into the model that the recipe names."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.checkpoint.manifest import CheckpointError
from whet.checkpoint.store import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from whet.models.config import ModelConfig


FURTHER = "policies"


def policy_folder(folder: Path, name: str) -> Path:
    """Return the folder of a policy in the folder of a run or a checkpoint. The main one has the name ``""``."""
    return folder / FURTHER / name if name else folder


def load_policy(checkpoint: Checkpoint, config: "ModelConfig", name: str = "") -> "PreTrainedModel":
    """Return the checkpoint's policy, or the further policy ``name``, on the CPU in float32 (a ``PreTrainedModel``, or
    a ``PeftModel`` with LoRA).
    Quantized layers are ordinary ones with the same values. Raises ``CheckpointError`` if its tensors do not match the
    model's."""
    import torch

    from whet.learner.state import load_weights
    from whet.models.loading import load_model
    from whet.models.quantized import dequantize

    path = policy_folder(checkpoint.folder, name) / "policy"
    if not path.is_dir():
        others = ", ".join(sorted(part.name for part in checkpoint.folder.iterdir() if part.is_dir())) or "no model"
        raise CheckpointError(f"{checkpoint.folder} has no policy{f' {name!r}' if name else ''}; it has {others}")
    model: Any = load_model(config, dtype=torch.float32, train=True)
    dequantize(model)
    copy_into(
        model,
        load_weights(path, None if config.lora is None else config.lora.unseen),
        path,
        partial=config.lora is not None,
    )
    return model.eval()


def copy_into(model: "PreTrainedModel", tensors: "Mapping[str, Tensor]", path: Path, *, partial: bool) -> None:
    """Copy tensors by name into ``model``. With ``partial``, frozen tensors may be missing; tied copies always may."""
    import torch

    from whet.models.fit import match

    target = model.state_dict()
    copied = {target[name].data_ptr() for name in tensors if name in target}
    needed = {name for name, p in model.named_parameters() if p.requires_grad} if partial else target.keys()
    missing = {name: t for name, t in target.items() if name in needed and t.data_ptr() not in copied}
    if mismatch := match(tensors, missing | {name: target[name] for name in tensors if name in target}, types=False):
        raise CheckpointError(f"{path} does not fit the model that the run's recipe names: {mismatch}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            target[name].copy_(tensor)
