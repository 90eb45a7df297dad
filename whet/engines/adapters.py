"""Frozen LoRA adapters that an engine applies next to the one that is trained: a judge, for example, that is the same
model under another adapter. They are folders in peft's form. Whether they are adapters is checked before a run starts,
without torch; whether they fit the model, before its engine starts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from whet.base.errors import ConfigError
from whet.base.strict_json import JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BASE = "base"
"""The name under which the model is asked without any adapter."""
Shape: TypeAlias = tuple[int, ...]
_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True, slots=True)
class FrozenAdapter:
    """An adapter in a folder."""

    name: str
    folder: Path
    rank: int
    shapes: Mapping[str, tuple[Shape, Shape]]  # of A and B, by the name of the adapted module in the model

    def __str__(self) -> str:
        return f"generator.adapters.{self.name} = {self.folder}"

    def check_fits(self, linear: Mapping[str, Shape]) -> None:
        """Raise ``ConfigError`` for a model whose linear layers, by name, don't fit it."""
        for module, given in self.shapes.items():
            if module not in linear:
                raise ConfigError(f"{self} adapts {module}, and the model has no such linear layer")
            rows, columns = linear[module]
            expected = ((self.rank, columns), (rows, self.rank))
            if given != expected:
                raise ConfigError(
                    f"{self}: the matrices of {module} have the shapes {given[0]} and {given[1]}; with rank "
                    f"{self.rank} the model needs {expected[0]} and {expected[1]}"
                )


def read_adapters(folders: Mapping[str, str]) -> tuple[FrozenAdapter, ...]:
    """Return the adapters in these folders, by name. Raises ``ConfigError`` for a folder without an adapter that an
    engine can apply."""
    return tuple(_read(name, Path(folder)) for name, folder in folders.items())


def _read(name: str, folder: Path) -> FrozenAdapter:
    from safetensors import SafetensorError, safe_open

    where = f"generator.adapters.{name} = {folder}"
    try:
        settings: JsonObject = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "adapter_model.safetensors", "np") as file:
            sizes: dict[str, Shape] = {
                key: tuple(file.get_slice(key).get_shape())
                for key in file.keys()  # noqa: SIM118
            }
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
    shapes = {}
    for module in dict.fromkeys(_module(where, key) for key in sizes):
        pair = [sizes.get(f"{_PREFIX}{module}{end}", ()) for end in _ENDS]
        if [each[place : place + 1] for place, each in enumerate(pair)] != [(rank,), (rank,)]:
            raise ConfigError(
                f"{where}: the matrices of {module} have the shapes {pair[0]} and {pair[1]}, and the rank of its "
                f"config, r = {rank}, must be the rows of the first and the columns of the second"
            )
        shapes[module] = pair[0], pair[1]
    if not shapes:
        raise ConfigError(f"{where} adapts nothing")
    return FrozenAdapter(name, folder, rank, shapes)


def _module(where: str, key: str) -> str:
    end = next((end for end in _ENDS if key.endswith(end)), None)
    if end is None or not key.startswith(_PREFIX):
        raise ConfigError(f"{where} has the tensor {key}; an engine applies the matrices of LoRA on linear layers only")
    return key.removeprefix(_PREFIX).removesuffix(end)


def linear_layers(model: "PretrainedConfig") -> dict[str, Shape]:
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
