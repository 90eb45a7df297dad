"""A learner's state on disk: ``model.safetensors``, ``optimizer.safetensors``, ``learner.json``. Loading is bit-exact,
and checks every name, shape and type before it changes anything. Knows parameters and files, no loss and no batch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.checkpoint.files import save_tensors
from whet.errors import WhetError
from whet.metrics.atomic import write_atomically

FACTS = "learner.json"
WEIGHTS = "model.safetensors"
MOMENTS = "optimizer.safetensors"


def changing(modules: Mapping[str, nn.Module | None]) -> dict[str, Tensor]:
    """What training changes, by name: everything, without the repetition of tied weights; where some of it is frozen
    (LoRA, a model that only scores), the trained parameters. Keys of ``modules`` are prefixes."""
    found: dict[str, Tensor] = {}
    for prefix, module in modules.items():
        if module is None:
            continue
        parameters = dict(module.named_parameters())
        found.update({prefix + name: p for name, p in parameters.items() if p.requires_grad})
        if all(p.requires_grad for p in parameters.values()):
            persistent = module.state_dict(keep_vars=True)
            buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
            found.update({prefix + name: buffer for name, buffer in buffers.items()})
    return found


def save_state(
    folder: Path, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None, facts: Mapping[str, Any]
) -> None:
    """Write into an existing folder, each file at once; the facts (JSON values) come last."""
    save_tensors(folder / WEIGHTS, tensors)
    save_tensors(folder / MOMENTS, _moments(tensors, optimizer))
    write_atomically(folder / FACTS, json.dumps(dict(facts), indent=1).encode())


def load_state(folder: Path, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Copy into the tensors and the optimizer in place; returns the facts. Raises ``WhetError`` where the files belong
    to another model, or are missing."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
        weights, moments = load_file(folder / WEIGHTS), load_file(folder / MOMENTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise WhetError(f"no learner can be loaded from {folder}: {error}") from error
    expected: dict[str, Tensor] = {}
    if moments:
        for name, tensor in tensors.items():
            if optimizer is not None and tensor.requires_grad:
                expected |= {f"exp_avg/{name}": tensor, f"exp_avg_sq/{name}": tensor, f"step/{name}": torch.zeros(())}
    _check(folder / WEIGHTS, weights, tensors)
    _check(folder / MOMENTS, moments, expected)

    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])
    if optimizer is not None:
        optimizer.state.clear()
        for name in (key.removeprefix("step/") for key in moments if key.startswith("step/")):
            parameter = tensors[name]
            optimizer.state[parameter] = {
                kind: moments[f"{kind}/{name}"].to(parameter.device) for kind in ("step", "exp_avg", "exp_avg_sq")
            }
    return facts


def _moments(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    return {
        f"{kind}/{name}": value
        for name, tensor in tensors.items()
        if tensor in optimizer.state
        for kind, value in optimizer.state[tensor].items()
    }


def _check(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not of this model" for name in found if name not in expected]
    for name in found.keys() & expected.keys():
        have, want = found[name], expected[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            wrong.append(f"{name} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
    if wrong:
        raise WhetError(
            f"{path} does not fit this learner: {'; '.join(sorted(wrong)[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}. "
            "Resume with the model, LoRA and precision settings that it was saved with"
        )
