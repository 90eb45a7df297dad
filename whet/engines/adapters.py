"""Frozen LoRA adapters that an engine applies next to the one that is trained: a judge, for example, that is the same
model under another adapter. They are folders in peft's form, and are checked here before an engine starts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from whet.base.errors import ConfigError
from whet.base.strict_json import JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BASE = "base"
"""The name under which the model is asked without any adapter."""
_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True, slots=True)
class FrozenAdapter:
    """An adapter in a folder."""

    name: str
    folder: Path
    rank: int
    modules: tuple[str, ...]  # the names of the adapted modules in the model


def read_adapters(folders: Mapping[str, str], model: "PretrainedConfig") -> tuple[FrozenAdapter, ...]:
    """Return the adapters in these folders, by name. Raises ``ConfigError`` for a folder without an adapter of the
    model that an engine can apply."""
    if not folders:
        return ()
    shapes = _shapes(model)
    return tuple(_read(name, Path(folder), shapes) for name, folder in folders.items())


def _read(name: str, folder: Path, shapes: Mapping[str, tuple[int, int]]) -> FrozenAdapter:
    from safetensors import SafetensorError, safe_open

    where = f"generator.adapters.{name} = {folder}"
    try:
        settings: JsonObject = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            sizes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{where} is not an adapter in peft's form (adapter_config.json, adapter_model.safetensors), as whet "
            f"export --adapter writes it: {error}"
        ) from None
    if settings.get("peft_type") != "LORA" or settings.get("use_dora") or settings.get("bias", "none") != "none":
        raise ConfigError(f"{where}: an engine applies plain LoRA only, without DoRA and biases")
    rank = settings.get("r")
    if not isinstance(rank, int) or rank < 1 or settings.get("rank_pattern"):
        raise ConfigError(f"{where}: the rank of its config, r = {rank}, must be one number for all modules")
    modules = dict.fromkeys(_module(where, key) for key in sizes)
    for module in modules:
        if module not in shapes:
            raise ConfigError(f"{where} adapts {module}, and the model has no such linear layer")
        rows, columns = shapes[module]
        expected = ((rank, columns), (rows, rank))
        given = tuple(sizes.get(f"{_PREFIX}{module}{end}") for end in _ENDS)
        if given != expected:
            raise ConfigError(
                f"{where}: the matrices of {module} have the shapes {given[0]} and {given[1]}; with rank {rank} the "
                f"model needs {expected[0]} and {expected[1]}"
            )
    if not modules:
        raise ConfigError(f"{where} adapts nothing")
    return FrozenAdapter(name, folder, rank, tuple(modules))


def _module(where: str, key: str) -> str:
    end = next((end for end in _ENDS if key.endswith(end)), None)
    if end is None or not key.startswith(_PREFIX):
        raise ConfigError(f"{where} has the tensor {key}; an engine applies the matrices of LoRA on linear layers only")
    return key.removeprefix(_PREFIX).removesuffix(end)


def _shapes(model: "PretrainedConfig") -> dict[str, tuple[int, int]]:
    """Return the shape of each linear layer of a model, but of its head, by name. No weights are made."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(model)
    head = whole.get_output_embeddings()
    return {
        name: (layer.out_features, layer.in_features)
        for name, layer in whole.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }
