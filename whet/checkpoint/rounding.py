"""The loss of what a run has learned where its weights are rounded to a narrower type. A base model in bfloat16 lies on
the grid of that type, so a change of less than half a step of the grid is rounded away."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

log = logging.getLogger(__name__)

_ALARM = 0.9


def warn_of_rounding(weights: Mapping[str, Tensor], base: Path, dtype: torch.dtype) -> None:
    """Warn if little of what a run changed is left in ``dtype``. ``base`` is the folder of the model that it started
    from."""
    kept = kept_share(weights, base, dtype) if dtype != torch.float32 else None
    if kept is not None and kept < _ALARM:
        log.warning(
            "in %s about %.0f%% of what the run changed is left: most changes are smaller than the steps of this type, "
            "so the written model is behind the run's. Write it in float32 (--dtype float32)",
            str(dtype).removeprefix("torch."), 100 * max(0.0, kept),
        )  # fmt: skip


def kept_share(weights: Mapping[str, Tensor], base: Path, dtype: torch.dtype) -> float | None:
    """Return the share of the change from the base model that is left in ``dtype``: the projection of the rounded
    change on the exact one. None if nothing changed, or the names of the base model's tensors are others."""
    exact, rounded = 0.0, 0.0
    for file in sorted(base.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys() & weights.keys():
                    weight, before = weights[name].detach().float(), tensors.get_tensor(name).float()
                    if weight.shape == before.shape:
                        change = (weight - before).flatten()
                        exact += float(change @ change)
                        rounded += float(change @ (weight.to(dtype).float() - before).flatten())
        except (OSError, SafetensorError):
            return None
    return rounded / exact if exact else None
