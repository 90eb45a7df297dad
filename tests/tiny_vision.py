"""A tiny model that reads images, and pictures to read."""

import base64
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedModel,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from whet.core.types import Message
from whet.models.tiny import tiny_tokenizer

TEMPLATE = (  # contents are lists of parts only, as in the templates of Idefics 3 and SmolVLM
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def save_tiny_vision(folder: Path, split: bool = False, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """Write a tiny Idefics 3 with 4 features for an image (``split``: and for each of its tiles) to a folder, and
    return it with its processor."""
    sizes = {"size": {"longest_edge": 64 if split else 32}, "max_image_size": {"longest_edge": 32}}
    images = Idefics3ImageProcessorPil(**sizes, do_image_splitting=split)
    processor = Idefics3Processor(images, tiny_tokenizer(TEMPLATE), image_seq_len=4, chat_template=TEMPLATE)
    text = {
        "model_type": "llama", "vocab_size": 272, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 256,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 8,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=processor.image_token_id,
        pad_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "connector" in name:
                    parameter.mul_(30)  # so that images matter among embeddings
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, AutoProcessor.from_pretrained(folder)
