"""A tiny model of random weights that reads images and bytes, a function of the seed alone: to try recipes and
pipelines with images in minutes, without a download."""

from pathlib import Path

from whet.base.extras import require
from whet.models.tiny import SPECIAL, VOCAB, tiny_tokenizer, vocab_id

TEMPLATE = (  # contents are lists of parts only, as in the templates of Idefics 3 and SmolVLM
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_vision_model(
    folder: Path, seed: int = 0, *, width: int = 96, layers: int = 3, pixels: int = 48, tiles: bool = False
) -> None:
    """Write an Idefics 3 with a decoder and a vision tower of this width and number of layers, in float32, its
    tokenizer and its processor. Images are scaled to at most ``pixels`` by ``pixels``, a multiple of 16, in patches of
    8, of which 4 become a feature; with ``tiles``, larger ones are also read in parts of that size."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.utils.logging import disable_progress_bar

    require("images", "a model that reads images", "PIL")
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    disable_progress_bar()
    edge = {"longest_edge": pixels}
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * pixels} if tiles else edge, max_image_size=edge, do_image_splitting=tiles
        ),
        tiny_tokenizer(TEMPLATE),
        image_seq_len=(pixels // 16) ** 2,
        chat_template=TEMPLATE,
    )
    padding = vocab_id(SPECIAL[0])
    config = Idefics3Config(
        text_config={
            "model_type": "llama", "vocab_size": VOCAB + 8, "hidden_size": width, "intermediate_size": 2 * width,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4,
            "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": vocab_id("<|im_end|>"),
            "pad_token_id": padding,
        },
        vision_config={
            "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
            "num_attention_heads": 4, "image_size": pixels, "patch_size": 8,
        },
        scale_factor=2,
        image_token_id=processor.image_token_id,
        pad_token_id=padding,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
