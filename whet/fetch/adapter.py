"""An adapter of PEFT as the model to start from: it is merged into its base model once, in the cache folder, so that
every later part sees an ordinary model folder.
"""

import hashlib
import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

from whet.base.digests import digest
from whet.base.errors import WhetError
from whet.base.extras import extra
from whet.base.files import expanded, replacing
from whet.base.progress import PROGRESS
from whet.fetch.casting import cast_model
from whet.fetch.download import cache_folder, filling

log = logging.getLogger(__name__)

_CONFIG = "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter instead of a whole model."""
    return (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(adapter: Path) -> tuple[str, str | None]:
    """Return the folder or Hub id of an adapter's base model, and its revision. Raises ``WhetError`` if it names none
    that a policy could start from."""
    path = adapter / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        base, revision, task = (config.get(key) for key in ("base_model_name_or_path", "revision", "task_type"))
    except (OSError, ValueError, AttributeError) as error:
        raise WhetError(f"adapter {path} can't be read: {error}") from None
    if not base or expanded(base).resolve() == adapter.resolve():
        raise WhetError(f"adapter {path} names no base model; set its base_model_name_or_path")
    if task not in (None, "CAUSAL_LM"):
        raise WhetError(f"adapter {path} is for the task {task}, and a model to train needs CAUSAL_LM")
    return str(base), revision


def merged_folder(adapter: Path, base: Path) -> Path:
    """Return a folder with the base model and the adapter merged into it. The first call writes it; processes that
    call at the same time wait. Raises ``WhetError`` if the two don't fit."""
    files = sorted(path for path in base.iterdir() if path.is_file())
    facts = [str(base.resolve()), *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)]
    facts += [digest(path) for path in sorted(adapter.iterdir()) if path.is_file() and path.suffix != ".md"]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    folder = cache_folder() / f"merged-{adapter.resolve().name}-{key}"
    with filling(folder):
        if not folder.is_dir():
            PROGRESS.begin(f"merging {adapter.name} into its base model")
            log.info("merging the adapter %s into %s, in %s", adapter, base, folder)
            with replacing(folder) as staging:
                _merge(adapter, base, staging)
            PROGRESS.begin("loading")
    return folder


def merged_model(adapted: Any) -> Any:
    """Return a model of PEFT with its adapters merged into its weights. Tied embeddings of which one side is adapted
    become two matrices: PEFT adds B A to the side that it adapts alone, but would merge it into both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = adapted.get_base_model()
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(end, BaseTunerLayer) for end in ends):
        inputs, outputs = (getattr(end, "base_layer", end) for end in ends)
        if outputs is not None and outputs.weight is inputs.weight:
            outputs.weight = type(outputs.weight)(outputs.weight.detach().clone())
            for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
                config.tie_word_embeddings = False
    return adapted.merge_and_unload()


def _merge(adapter: Path, base: Path, out: Path) -> None:
    """A base model that reads images keeps its vision tower, unless the adapter was made for its text part alone."""
    with extra("lora", f"the adapter {adapter}"):
        from peft import PeftModel
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    def merged(kind: Any) -> Any:
        with warnings.catch_warnings():
            # PEFT would go on, with adapters that change nothing.
            warnings.filterwarnings("error", "Found missing adapter keys")
            model = kind.from_pretrained(base, dtype=torch.float32, use_safetensors=True)
            return merged_model(PeftModel.from_pretrained(model, str(adapter)))

    try:
        config = AutoConfig.from_pretrained(base)
        try:
            model = merged(AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM)
        except (ValueError, UserWarning):
            model = merged(AutoModelForCausalLM)
    except Exception as error:  # damaged or strange files raise errors of several libraries
        text = str(error).strip().partition("\n")[0]
        raise WhetError(f"adapter {adapter} can't be merged into {base}: {type(error).__name__}: {text}") from error
    cast_model(model, config.dtype or torch.float32).save_pretrained(out)
    for path in base.glob("*processor_config.json"):  # of images
        shutil.copy(path, out)
    tokens = adapter if (adapter / "tokenizer_config.json").is_file() else base
    AutoTokenizer.from_pretrained(tokens).save_pretrained(out)
