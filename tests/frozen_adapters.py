"""LoRA adapters in peft's form, with random matrices."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def save_adapter(folder: Path, model: Any, seed: int, modules: list[str] | str, rank: int = 4, **settings: Any) -> Path:
    """Write an adapter of a copy of the model to a folder."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=modules, r=rank, lora_alpha=3 * rank, **settings)
    kind: Any = type(model)
    adapted = get_peft_model(kind(model.config), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                drawn = torch.Generator().manual_seed(hash_of(name, seed))
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.2)
    adapted.save_pretrained(folder)
    return folder


def hash_of(name: str, seed: int) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(name)) + 7919 * seed
