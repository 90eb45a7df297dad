"""Tiny models that read images, and pictures to read."""

import base64
import io
import json
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_tokenizer
from whet.core.types import Message
from whet.models.tiny import SPECIAL, VOCAB, vocab_id
from whet.models.tiny_vision import TEMPLATE, save_tiny_vision_model

Family = Literal["idefics3", "tiles", "qwen2_5_vl", "qwen3_vl", "internvl"]
FAMILIES: tuple[Family, ...] = ("idefics3", "tiles", "qwen2_5_vl", "qwen3_vl", "internvl")
_QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def picture(color: str | tuple[int, int, int] = "red", width: int = 40, height: int = 20) -> str:
    """Return the data URL of a picture with one colour on the left."""
    image = Image.new("RGB", (width, height), "white")
    image.paste(color, (0, 0, width // 2, height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def asked(*urls: str, text: str = "Which colour?") -> Message:
    """Return a question about pictures."""
    return {
        "role": "user",
        "content": [*({"type": "image", "url": url} for url in urls), {"type": "text", "text": text}],
    }


def save_tiny_vision(folder: Path, family: Family = "idefics3") -> None:
    """Write a tiny model to a folder: an Idefics 3 with 4 features for an image (``tiles``: and for each of its tiles),
    a Qwen-VL with a feature for each 16 by 16 pixels, or an InternVL with 4 features for an image and for its tiles."""
    if family in ("qwen2_5_vl", "qwen3_vl"):
        _save_qwen(folder, family)
    elif family == "internvl":
        _save_internvl(folder)
    else:
        save_tiny_vision_model(folder, width=32, layers=2, pixels=32, tiles=family == "tiles")
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if any(part in name for part in ("connector", "merger", "projector")):
            weights[name] *= 30  # so that images matter among embeddings
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _save_qwen(folder: Path, family: Family) -> None:
    """Write a tiny Qwen-VL with the files of the published ones: without a file of the whole processor."""
    from transformers import AutoConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer = tiny_tokenizer(TEMPLATE.replace("<image>", mark))
    tokenizer.add_special_tokens({"additional_special_tokens": list(_QWEN_MARKS)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(_QWEN_MARKS))
    text: dict[str, Any] = {
        "vocab_size": VOCAB + 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]},
        "bos_token_id": None, "eos_token_id": vocab_id("<|im_end|>"), "pad_token_id": vocab_id(SPECIAL[0]),
    }  # fmt: skip
    tower: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "depth": 3, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32,
    }  # fmt: skip
    if family == "qwen3_vl":
        tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    else:
        del text["head_dim"]  # the hidden size determines it
        text["rope_parameters"]["mrope_section"] = [2, 1, 1]
        tower |= {"window_size": 32, "fullatt_block_indexes": [1]}
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=tower, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    _save(folder, config, tokenizer)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 32 * 32, "longest_edge": 48 * 48}, patch_size=8).save_pretrained(
        folder
    )
    path = folder / "preprocessor_config.json"
    names = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processor_class": names[family]}))


_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB + 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "bos_token_id": None, "eos_token_id": vocab_id("<|im_end|>"), "pad_token_id": vocab_id(SPECIAL[0]),
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def _save_internvl(folder: Path) -> None:
    from transformers import InternVLConfig
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokenizer = _with_tokens(names, "<IMG_CONTEXT>")
    config = InternVLConfig(
        text_config=_TEXT | {"model_type": "qwen2"},
        vision_config=_TOWER | {"image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=tokenizer.context_image_token_id,
    )
    _save(folder, config, tokenizer)
    GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=2).save_pretrained(folder)
    settings = {"image_seq_length": 4, "processor_class": "InternVLProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def save_tiny_gemma(folder: Path) -> None:
    """Write a tiny Gemma 3, in which the tokens of an image attend to each other in both directions."""
    from transformers import Gemma3Config, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _with_tokens(names, "<start_of_image>")
    config = Gemma3Config(
        text_config=_TEXT | {"head_dim": 16, "sliding_window": 64},
        vision_config=_TOWER | {"image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    _save(folder, config, tokenizer)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("mm_input_projection_weight"))  # zero at first
    weights[name] = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)


def _with_tokens(names: dict[str, str], mark: str) -> Any:
    """Return a tokenizer with tokens under these names, whose chat template writes ``mark`` for an image."""
    from transformers import PreTrainedTokenizerFast

    template = TEMPLATE.replace("<image>", mark)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=names,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def _save(folder: Path, config: Any, tokenizer: Any) -> None:
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
