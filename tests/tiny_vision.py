"""Tiny models that read images, and pictures to read."""

import base64
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_tokenizer
from whet.core.types import Message
from whet.models.published import as_published
from whet.models.tiny import SPECIAL, VOCAB, vocab_id
from whet.models.tiny_vision import TEMPLATE, save_tiny_vision_model

Family = Literal[
    "idefics3", "tiles", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "smolvlm", "gemma3", "gemma4",
    "gemma4_small", "qwen3_5", "llama4",
]  # fmt: skip
FAMILIES: tuple[Family, ...] = tuple(
    name for name in get_args(Family) if name not in ("qwen3_vl_moe", "gemma4_small", "llama4")
)
"""The families that the built-in engine has, without experts: it computes a row to the same bit in any crowd."""
_QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def picture(color: str | tuple[int, ...] = "red", width: int = 40, height: int = 20) -> str:
    """Return the data URL of a picture with one colour on the left. A colour of four numbers lets through the light."""
    image = Image.new("RGBA" if len(color) == 4 and not isinstance(color, str) else "RGB", (width, height), "white")
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


def saved_families(factory: pytest.TempPathFactory, families: Sequence[Family]) -> dict[Family, Path]:
    """Write a tiny model of each family to a new folder."""
    folders = {family: factory.mktemp(family) for family in families}
    for family, folder in folders.items():
        save_tiny_vision(folder, family)
    return folders


def save_tiny_vision(folder: Path, family: Family = "idefics3", *, wide: bool = False) -> None:
    """Write a tiny model to a folder: an Idefics 3 with 4 features for an image (``tiles``: and for each of its tiles),
    a Qwen-VL with a feature for each 16 by 16 pixels, an InternVL or a SmolVLM 2 with 4 features for an image and for
    its tiles, or a Gemma. ``wide``: with heads of 32, the least that vLLM's attention takes on CPUs."""
    if family.startswith("qwen"):
        _save_qwen(folder, family)
    elif family in ("idefics3", "tiles"):
        save_tiny_vision_model(folder, width=32, layers=2, pixels=32, tiles=family == "tiles")
    else:
        savers = {"internvl": _save_internvl, "smolvlm": _save_smolvlm, "gemma3": _save_gemma3, "gemma4": _save_gemma4}
        savers |= {"gemma4_small": partial(_save_gemma4, small=True), "llama4": _save_llama4}
        savers[family](folder)
    if wide:
        _widen(folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if any(part in name for part in ("connector", "merger", "projector")):
            weights[name] *= 30  # so that images matter among embeddings
        weights[name] = as_published(family, name, weights[name]).contiguous()
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
    if family == "qwen3_5":
        linear = {f"linear_{name}": size for name, size in {"num_key_heads": 2, "num_value_heads": 2}.items()}
        linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        text |= linear | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        text["rope_parameters"] |= {"partial_rotary_factor": 1.0, "mrope_interleaved": True}
        tower |= {"num_position_embeddings": 16}
    elif family in ("qwen3_vl", "qwen3_vl_moe"):
        tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
        text["rope_parameters"] |= {"mrope_interleaved": True}
        if family == "qwen3_vl_moe":
            tower["deepstack_visual_indexes"] = [0, 1, 2]
            text |= {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
            text |= {"norm_topk_prob": True}
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
    processor = "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processor_class": processor}))


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


_SMOLVLM_MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>")


def _save_smolvlm(folder: Path) -> None:
    """Write a tiny SmolVLM 2, with the files of the published ones: their processor reads videos, too."""
    from transformers import SmolVLMConfig
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tokenizer = tiny_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SMOLVLM_MARKS)})
    config = SmolVLMConfig(
        text_config=_TEXT | {"model_type": "llama"},
        vision_config=_TOWER | {"image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=vocab_id(SPECIAL[0]),
    )
    _save(folder, config, tokenizer)
    SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    ).save_pretrained(folder)
    settings = {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(settings))


_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip


def _save_gemma3(folder: Path) -> None:
    """Write a tiny Gemma 3, in which the 16 tokens of an image attend to each other in both directions."""
    from transformers import Gemma3Config, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _with_tokens(names, "<start_of_image>")
    config = Gemma3Config(
        text_config=_TEXT | _GEMMA,
        vision_config=_TOWER | {"image_size": 32, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=16,
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
    Gemma3Processor(images, tokenizer, image_seq_length=16).save_pretrained(folder)


_GEMMA4_MARKS = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
}  # fmt: skip


def _save_gemma4(folder: Path, small: bool = False) -> None:
    """Write a tiny Gemma 4 with embeddings for each layer, in which the tokens of an image, at most 70, attend to each
    other in both directions in layers with a window. ``small``: as the published small ones, whose last layers share
    keys and values, whose tower clips, and which also hear."""
    from transformers import Gemma4AudioConfig, Gemma4Config
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    tokenizer = _with_tokens(_GEMMA4_MARKS, "<|image|>", padded_by_0=True)
    text = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB + 8, "global_head_dim": 32}
    text |= {"pad_token_id": 0, "use_bidirectional_attention": "vision"}
    tower = {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3}
    tower |= {"default_output_length": 70}
    audio = None
    if small:
        text |= {"num_kv_shared_layers": 1, "use_double_wide_mlp": True, "use_bidirectional_attention": None}
        tower |= {"use_clipped_linears": True}
        heard = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 48}
        audio = Gemma4AudioConfig(**heard, subsampling_conv_channels=[16, 8])
    else:
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        tower |= {"standardize": True}
    config = Gemma4Config(
        text_config=_TEXT | _GEMMA | text,
        vision_config=_TOWER | tower,
        audio_config=audio,
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        audio_token_id=tokenizer.audio_token_id,
        video_token_id=VOCAB + 7,
    )
    _save(folder, config, tokenizer)
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Gemma4Processor"}))


_LLAMA4_MARKS = {
    "boi_token": "<|image_start|>", "eoi_token": "<|image_end|>", "image_token": "<|image|>",
    "patch_token": "<|patch|>", "x": "<|tile_x_separator|>", "y": "<|tile_y_separator|>", "fake": "<|fake|>",
}  # fmt: skip


def _save_llama4(folder: Path) -> None:
    """Write a tiny Llama 4 with 4 features for an image and for its tiles. Its processor needs torchvision."""
    from transformers import Llama4Config, Llama4Processor
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

    tokenizer = _with_tokens(_LLAMA4_MARKS, "<|image|>")
    layers = {"num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 2, "moe_layers": [1, 3]}
    layers |= {"intermediate_size_mlp": 64, "attention_chunk_size": 4096}
    tower = {"intermediate_size": 128, "image_size": 32, "patch_size": 8, "pixel_shuffle_ratio": 0.5}
    tower |= dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
    config = Llama4Config(
        text_config=_TEXT | layers | {"vocab_size": VOCAB + 16},
        vision_config=_TOWER | tower,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.patch_token_id,
    )
    _save(folder, config, tokenizer)
    images = Llama4ImageProcessor(size={"height": 32, "width": 32}, max_patches=4)
    Llama4Processor(images, tokenizer, patch_size=8, pixel_shuffle_ratio=0.5).save_pretrained(folder)


def _with_tokens(names: dict[str, str], mark: str, *, padded_by_0: bool = False) -> Any:
    """Return a tokenizer with tokens under these names, whose chat template writes ``mark`` for an image.
    ``padded_by_0``: the padding token and the first byte change places."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = tiny_tokenizer().backend_tokenizer
    if padded_by_0:
        settings = json.loads(backend.to_str())
        ids, padding = settings["model"]["vocab"], vocab_id(SPECIAL[0])
        first = next(token for token, number in ids.items() if number == 0)
        ids |= {first: padding, SPECIAL[0]: 0}
        next(token for token in settings["added_tokens"] if token["content"] == SPECIAL[0])["id"] = 0
        backend = Tokenizer.from_str(json.dumps(settings))
    template = TEMPLATE.replace("<image>", mark)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=names,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def _widen(folder: Path) -> None:
    """Write the model again with a decoder of 4 heads of 32, and of 128 in linear attention."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder)
    text, tower = config.get_text_config(), config.vision_config
    text.hidden_size, text.head_dim = 128, 32
    if hasattr(text, "linear_key_head_dim"):
        text.linear_key_head_dim = text.linear_value_head_dim = 128
    if getattr(text, "sliding_window", None):
        # At least the tokens of an image, as in published models.
        text.sliding_window = 80 if config.model_type == "gemma4" else 20
    if "mrope_section" in (text.rope_parameters or {}):
        text.rope_parameters["mrope_section"] = [8, 4, 4]
    if hasattr(tower, "out_hidden_size"):
        tower.out_hidden_size = 128
    _save_model(folder, config)


def _save(folder: Path, config: Any, tokenizer: Any) -> None:
    _save_model(folder, config)
    tokenizer.save_pretrained(folder)


def _save_model(folder: Path, config: Any) -> None:
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
