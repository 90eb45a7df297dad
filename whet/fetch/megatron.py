"""A checkpoint of Megatron Core as the model to start from: a folder with Hugging Face's ``config.json`` and
tokenizer, and Megatron's distributed checkpoint (``torch_dist``) in place of safetensors. It is converted once, in the
cache folder, so that every later part sees an ordinary model folder.

Read by torch's distributed checkpoint alone: Megatron Core is not needed. Of its pickles only ``.metadata`` is read, by
an unpickler that builds nothing but descriptions of tensors; ``common.pt`` (arguments of the run) is not opened.
"""

import hashlib
import json
import logging
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.digests import digest
from whet.base.errors import WhetError
from whet.base.files import replacing
from whet.base.progress import PROGRESS
from whet.fetch.download import cache_folder, filling
from whet.fetch.megatron_layout import FAMILIES, from_megatron, is_weight

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

NEWEST = "latest_checkpointed_iteration.txt"
METADATA, FORMAT = ".metadata", "metadata.json"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}
_DESCRIPTIONS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))


def checkpoint_in(folder: Path) -> Path | None:
    """Return the folder of the newest checkpoint of Megatron Core in ``folder``, or ``folder`` itself if it is one;
    None if it has none. Raises ``WhetError`` if the newest is missing, or has another format than ``torch_dist``."""
    if (newest := folder / NEWEST).is_file():
        name = newest.read_text(encoding="utf-8", errors="replace").strip()
        inner = folder / (f"iter_{int(name):07d}" if name.isdecimal() else "release")
        if not (inner / METADATA).is_file():
            raise WhetError(f"{newest} says {name!r}, but {inner} has no checkpoint in Megatron Core's format")
    elif (folder / METADATA).is_file() and (folder / FORMAT).is_file():
        inner = folder
    else:
        return None
    try:
        backend = json.loads((inner / FORMAT).read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WhetError(f"{inner / FORMAT} can't be read: {type(error).__name__}: {error}") from None
    if backend != "torch_dist":
        raise WhetError(f"{inner} has Megatron Core's format {backend}; convert it there to torch_dist")
    return inner


def converted_folder(folder: Path, checkpoint: Path) -> Path:
    """Return a model folder with the weights of ``checkpoint``, and the config and tokenizer in ``folder``. The first
    call writes it; processes that call at the same time wait. Raises ``WhetError`` if the two don't fit."""
    small = [*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("*.model"), checkpoint / METADATA]
    facts = [digest(path) for path in sorted(small)]
    facts += [f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in sorted(checkpoint.glob("*.distcp"))]
    key = hashlib.sha256("\n".join([str(checkpoint.resolve()), *facts]).encode()).hexdigest()[:16]
    out = cache_folder() / f"megatron-{folder.resolve().name}-{key}"
    with filling(out):
        if not out.is_dir():
            PROGRESS.begin(f"converting {folder.name} from Megatron Core's format")
            log.info("converting the checkpoint %s of Megatron Core, in %s", checkpoint, out)
            with replacing(out) as staging:
                _convert(folder, checkpoint, staging)
            PROGRESS.begin("loading")
    return out


def _convert(folder: Path, checkpoint: Path, out: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    hf: Any = AutoConfig.from_pretrained(folder)
    if hf.model_type not in FAMILIES:
        raise WhetError(
            f"{folder}: checkpoints of Megatron Core are read for {', '.join(FAMILIES)}, and its config.json says "
            f"{hf.model_type}; convert it to Hugging Face's format elsewhere"
        )
    try:
        weights = from_megatron(_tensors(checkpoint), hf)
    except WhetError as error:
        raise WhetError(f"checkpoint {checkpoint}: {error}") from None
    except Exception as error:  # damaged files, or sizes of another model, raise errors of many kinds
        text = str(error).strip().partition("\n")[0]
        raise WhetError(
            f"checkpoint {checkpoint} can't be read as the model of {folder / 'config.json'}: "
            f"{type(error).__name__}: {text}"
        ) from error
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hf)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if hf.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights.get("model.embed_tokens.weight", torch.empty(0)))
    wrong = [
        f"{name} is {list(weights[name].shape) if name in weights else 'missing'}, not {list(shape)}"
        for name, shape in expected.items()
        if name not in weights or weights[name].shape != shape
    ]
    wrong += [f"{name} is not in that model" for name in weights.keys() - expected.keys()]
    if wrong:
        raise WhetError(
            f"checkpoint {checkpoint} does not fit {folder / 'config.json'}: {'; '.join(sorted(wrong)[:3])}"
        )
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.config.dtype = weights["model.norm.weight"].dtype
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def _tensors(checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
    """Yield the weights of a checkpoint by key, each whole, one at a time."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    class Reader(FileSystemReader):
        def read_metadata(self, *_: object, **__: object) -> Metadata:
            return metadata

    with (checkpoint / METADATA).open("rb") as file:
        metadata: Metadata = _Descriptions(file).load()
    metadata.storage_meta = None
    for key, stored in metadata.state_dict_metadata.items():
        if is_weight(key) and isinstance(stored, TensorStorageMetadata):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load({key: tensor}, storage_reader=Reader(checkpoint), no_dist=True)
            yield key, tensor


class _Descriptions(pickle.Unpickler):
    """Reads descriptions of tensors and files. A pickle that names anything else is an error."""

    def find_class(self, module: str, name: str) -> object:
        import torch

        if (module, name) == (_DESCRIPTIONS[0], "TensorProperties"):
            return _properties()
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 names it
        if "." not in name and (module in _DESCRIPTIONS or module == "torch" or (module, name) in _ALLOWED):
            value = super().find_class(module, name)
            plain = is_dataclass(value) or (isinstance(value, type) and issubclass(value, Enum))
            if (module, name) in _ALLOWED or isinstance(value, torch.dtype) or (module != "torch" and plain):
                return value
        raise WhetError(f"its {METADATA} would load {module}.{name}, which no checkpoint needs; it was not read")


def _properties() -> type:
    """Return the class of a tensor's properties without strides, which torch 2.15 adds and older ones can't read."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    class Properties(TensorProperties):
        def __setstate__(self, state: tuple[object, ...]) -> None:
            super().__setstate__(state[:5])

    return Properties
