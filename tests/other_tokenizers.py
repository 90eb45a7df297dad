"""Tokenizers that cut text otherwise than the tiny one does: made in memory, without a download."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "write letters and words, then write more letters and more words",
    "Grüße aus Köln 👍🏽 und 日本語のテキスト, naïve café",
    "what is 17 + 4? the answer is \\boxed{21}. the answer is \\boxed{7}.",
]
INSTRUCT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'system' %}[SYS]{{ message['content'] }}[/SYS]"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)


def bpe_tokenizer(merges: int = 120) -> PreTrainedTokenizerFast:
    """Byte-level BPE learned from ``TEXT``: words, pairs of words' parts, and bytes of what it has not seen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257 + merges, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrapped(tokenizer)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Spaces belong to the next word, and the first one is left out again when text is decoded; unseen characters are
    bytes in angle brackets. As Llama 2 does it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<0x00>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials[:1], show_progress=False)
    trained = Tokenizer(models.BPE())
    trained.normalizer = tokenizer.normalizer
    trained.train_from_iterator(["write letters words abc defgh ijklm nopqr stuvw xyz 0123456789 .,"], trainer)
    pieces = [*specials, *(piece for piece in sorted(trained.get_vocab()) if piece not in specials)]
    merges = [tuple(pair) for pair in _merges(trained)]
    tokenizer.model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<0x00>"
    )
    return _wrapped(tokenizer)


def lowercase_tokenizer() -> PreTrainedTokenizerFast:
    """One that can't write capitals."""
    wrapped = bpe_tokenizer()
    wrapped.backend_tokenizer.normalizer = normalizers.Lowercase()
    return wrapped


def save_with(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int = 1, **changes: Any) -> Path:
    """A tiny random model with this tokenizer."""
    from tests.tiny import tiny_llama

    tiny_llama(len(tokenizer), seed=seed, eos_token_id=None, pad_token_id=None, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    import json

    found: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return found


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["</s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)
    wrapped.chat_template = INSTRUCT
    return wrapped
