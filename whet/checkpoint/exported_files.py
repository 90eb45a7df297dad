"""The files of an exported model: weights in one of several formats, and the tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.files import expanded, load_tensors, remove, save_tensors
from whet.base.lazy import FileDtype, torch_dtype
from whet.checkpoint.gguf_file import GgufType, write_gguf
from whet.checkpoint.megatron_file import write_megatron
from whet.checkpoint.reward_model import choose_padding

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from whet.models.config import ModelConfig


def gguf_name(kind: GgufType) -> str:
    return f"model-{kind}.gguf"


def replace_by_gguf(staging: Path, kind: GgufType, name: str) -> None:
    """Replace transformers' files, in full precision, by one GGUF file."""
    files = list(staging.iterdir())
    write_gguf(staging, staging / gguf_name(kind), kind, name)
    for file in files:
        remove(file)


def saved_dtype(config: "ModelConfig", dtype: FileDtype | None, gguf: GgufType | None) -> "torch.dtype":
    """Return the dtype of the weights: the one that was asked for, or the base model's. A GGUF file is made from
    float32."""
    import torch

    from whet.models.loading import load_model_config

    if gguf is not None:
        return torch.float32
    return torch_dtype(dtype) if dtype else getattr(load_model_config(config), "dtype", None) or torch.float32


def write_adapter(model: "PreTrainedModel", config: "ModelConfig", dtype: "torch.dtype", staging: Path) -> None:
    from whet.fetch.casting import cast_model

    model.peft_config["default"].base_model_name_or_path = _portable_name(config)
    cast_model(model, dtype).save_pretrained(staging, save_embedding_layers=False)


def whole_model(
    model: "PreTrainedModel", config: "ModelConfig", run: Path, dtype: "torch.dtype", gguf: GgufType | None
) -> "PreTrainedModel":
    """Return the model in ``dtype``, with a LoRA adapter merged into it. Warns if rounding loses what the run has
    learned."""
    import torch

    from whet.checkpoint.rounding import warn_of_rounding
    from whet.fetch.adapter import merged_model
    from whet.fetch.casting import cast_model
    from whet.models.loading import resolve

    if hasattr(model, "merge_and_unload"):
        model = merged_model(model)  # in float32, so that the sum is rounded only once
    # q8_0 is not among them: a base model's weights don't lie on its grid, so that small changes count on average
    written = {"f16": torch.float16, "bf16": torch.bfloat16}.get(gguf or "", dtype)
    warn_of_rounding(model.state_dict(), resolve(config), written, run, "--gguf f32" if gguf else "--dtype float32")
    return cast_model(model, dtype)


def write_megatron_files(model: "PreTrainedModel", staging: Path) -> None:
    model.config.dtype = model.dtype
    model.config.save_pretrained(staging)
    write_megatron(model.state_dict(), model.config, staging)


def write_safetensors(model: "PreTrainedModel", staging: Path) -> None:
    model.save_pretrained(staging)
    _write_as_published(model.config.model_type, staging)


def _write_as_published(model_type: str, staging: Path) -> None:
    """Write weights again that transformers writes in another layout than the model's published files."""
    from whet.models.published import TRANSPOSED, as_published

    for file in staging.glob("*.safetensors") if model_type in TRANSPOSED else ():
        save_tensors(file, {name: as_published(model_type, name, part) for name, part in load_tensors(file).items()})


def write_tokenizer(config: "ModelConfig", chat_template: str | None, staging: Path, judges: bool) -> int | None:
    """Write the tokenizer; return the id of the padding token for a reward model, whose scores depend on it."""
    from whet.chat.renderer import Renderer
    from whet.models.loading import load_tokenizer, resolve, save_processor

    tokenizer: Any = load_tokenizer(config)
    padding = None
    if chat_template is not None or judges:
        renderer = Renderer(tokenizer, chat_template)
        tokenizer.chat_template = renderer.template
        padding = choose_padding(tokenizer, renderer, config) if judges else None
    if config.vision is not None:
        save_processor(resolve(config), staging)
    tokenizer.save_pretrained(staging)
    return padding


def _portable_name(config: "ModelConfig") -> str:
    """Return the name of an adapter's base model: the Hub id if it has one, else the folder."""
    from whet.models.loading import resolve

    local = expanded(config.path).is_dir() or "/" not in config.path
    return str(resolve(config).resolve()) if local else config.path
