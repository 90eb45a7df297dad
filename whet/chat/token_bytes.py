"""The bytes that a token stands for. A token that is decoded by itself loses the space at its beginning with some
tokenizers, and where it ends inside a character a replacement character is all that is left of it."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""The characters for bytes in a byte-level vocabulary, since GPT-2."""


def token_bytes(tokenizer: "PreTrainedTokenizerBase") -> Callable[[int], bytes]:
    """Return a function that gives the bytes of one token of a tokenizer. Joined, they are the bytes of the text; with
    tokenizers that leave out a space at the beginning of a text, this space is in front of them."""
    decoder: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    steps = {} if decoder is None else json.loads(decoder.__getstate__())
    kinds = {step["type"] for step in (steps, *steps.get("decoders", ())) if step}
    added = tokenizer.added_tokens_decoder

    def of_token(token: int) -> bytes:
        piece = None if token in added else tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and "ByteLevel" in kinds and all(letter in _BYTE_LEVEL for letter in piece):
            return bytes(_BYTE_LEVEL[letter] for letter in piece)
        if isinstance(piece, str) and kinds & {"ByteFallback", "Metaspace"}:
            byte = _BYTE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(_SPACE, " ").encode()
        return tokenizer.decode([token], skip_special_tokens=False).encode()

    return of_token
