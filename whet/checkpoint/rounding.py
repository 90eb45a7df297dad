"""The loss of what a run has learned where its weights are rounded to a narrower type. A base model in bfloat16 lies on
the grid of that type, so a change of less than half a step of the grid is rounded away."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

log = logging.getLogger(__name__)

_ALARM = 0.9


def warn_of_rounding(weights: Mapping[str, Tensor], base: Path, dtype: torch.dtype, run: Path, advice: str) -> None:
    """Warn if little of what a run changed is left in ``dtype``, unless its engine has sampled in that type: then
    rounded weights have answered in the run, too. ``base`` is the folder of the model that it started from, ``advice``
    the option that writes float32."""
    if dtype == torch.float32 or _sampled_in(run) == str(dtype).removeprefix("torch."):
        return
    kept = kept_share(weights, base, dtype)
    if kept is not None and kept < _ALARM:
        log.warning(
            "in %s about %.0f%% of what the run changed is left: most changes are smaller than the steps of this type, "
            "so the written model is behind the run's. Write it in float32 (%s)",
            str(dtype).removeprefix("torch."), 100 * max(0.0, kept), advice,
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


def _sampled_in(run: Path) -> str | None:
    """Return the dtype in which a run's engine sampled, or None if the run has not recorded it."""
    try:
        decision = json.loads((run / "machine.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return decision.get("generator") if isinstance(decision, dict) else None
