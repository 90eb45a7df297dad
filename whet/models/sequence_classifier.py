"""Loading of a sequence classifier in a separate process, for reward models and classifiers of texts."""

from pathlib import Path
from typing import Any

import torch

from whet.base.errors import WhetError
from whet.base.lazy import torch_dtype
from whet.models.config import ModelConfig
from whet.models.loading import resolve


def load_classifier(
    model: str, revision: str | None, device: str, dtype: str, threads: int, kind: str, advice: str
) -> tuple[Path, Any, Any]:
    """Return the folder, the tokenizer and the model, and let torch compute with ``threads`` from here on. Raises
    ``WhetError`` for a model that can't be loaded, and with ``advice`` if weights are missing, so that it is not
    a ``kind``."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise WhetError("device is cuda, but torch finds no GPU here; use cpu")
    folder = resolve(ModelConfig(path=model, revision=revision))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch_dtype(dtype), use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise WhetError(f"{folder} can't be loaded as a sequence classifier: {error}") from error
    if info["missing_keys"]:
        raise WhetError(f"{folder} is not {kind}: it lacks {', '.join(sorted(info['missing_keys'])[:3])}. {advice}")
    return folder, tokenizer, loaded.to(device).eval()
