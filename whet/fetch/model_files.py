"""The files of a model's folder: the first that can't be read is named, before a library meets it."""

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from whet.base.errors import WhetError

_OBJECTS = (
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_INDEX = ".safetensors.index.json"
_PLAIN = ("F64", "F32", "F16", "BF16")
_WEIGHTS = ("weight", "proj")  # ends of names; masks and positions, which may be integers, have others
_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")


def check_files(folder: Path, with_weights: bool = False) -> None:
    """Raise ``WhetError`` naming a file that can't be opened, is damaged or, ``with_weights``, is missing
    although the index of the weights names it; or whose weights are numbers that only a quantized model has, in a
    folder that does not say how it was quantized."""
    try:
        for file in sorted(each for each in folder.iterdir() if each.name.endswith(_SUFFIXES) and each.is_file()):
            status = file.stat()
            if problem := _problem(file, status.st_ctime_ns, status.st_size):
                raise WhetError(f"the model's file {file} {problem}")
            if with_weights and file.name.endswith(_INDEX) and (missing := _missing(file)):
                raise WhetError(f"the model's file {missing[0]} is missing ({len(missing)} of those in {file})")
            if file.suffix == ".safetensors" and not _says_how_quantized(folder):
                _check_types(file, status.st_ctime_ns)
    except OSError as error:
        raise WhetError(f"the model's folder {folder} can't be read: {error.strerror}") from None


@lru_cache(maxsize=1024)
def _problem(file: Path, changed: int, size: int) -> str:
    """Return what is wrong with a file; empty if nothing is. Only the header of weights is read."""
    try:
        if file.suffix == ".safetensors":
            return _problem_of_weights(file, size)
        if file.name in _OBJECTS or file.name.endswith(_INDEX):
            return _problem_of_object(file)
        with file.open("rb"):
            return ""
    except OSError as error:
        return f"can't be read: {error.strerror}"


def _problem_of_object(file: Path) -> str:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is damaged, it is not JSON: {error}; copy or download it again"
    if not isinstance(value, dict):
        return f"is not a JSON object, but a {type(value).__name__}"
    if file.name.endswith(_INDEX) and not isinstance(value.get("weight_map"), dict):
        return "is damaged: it has no 'weight_map', which names the file of each weight; copy or download it again"
    return ""


def _missing(index: Path) -> list[Path]:
    files = {index.parent / name for name in json.loads(index.read_bytes())["weight_map"].values()}
    return sorted(file for file in files if not file.exists())


def _problem_of_weights(file: Path, size: int) -> str:
    """https://github.com/huggingface/safetensors#format: the length of the header, the header, the tensors."""
    damaged = "is damaged; copy or download it again"
    with file.open("rb") as opened:
        beginning = opened.read(8)
        length = struct.unpack("<Q", beginning)[0] if len(beginning) == 8 else size
        if 8 + length > size:
            pointer = beginning.startswith(b"version ")  # of Git LFS
            return "is a pointer of Git LFS, not the weights: run `git lfs pull`" if pointer else damaged
    try:
        tensors = _header(file).values()
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return damaged
    if 8 + length + end != size:
        return f"is damaged: it has {size:,} bytes, and its header says {8 + length + end:,}; copy or download it again"
    return ""


def _header(file: Path) -> dict[str, Any]:
    """Return the types and places of the tensors in a file of weights, by name."""
    with file.open("rb") as opened:
        length = struct.unpack("<Q", opened.read(8))[0]
        header = json.loads(opened.read(length))
    return {name: value for name, value in header.items() if name != "__metadata__"}


def _says_how_quantized(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and bool(json.loads(config.read_bytes()).get("quantization_config"))


@lru_cache(maxsize=1024)
def _check_types(file: Path, changed: int) -> None:
    """transformers converts all types to floating point without a word, also integers whose scales it does not
    read. The model would be another one."""
    types = {name: tensor.get("dtype") for name, tensor in _header(file).items()}
    strange = [name for name, stored in types.items() if name.endswith(_WEIGHTS) and stored not in _PLAIN]
    if strange:
        weights = "1 weight" if len(strange) == 1 else f"{len(strange)} weights"
        raise WhetError(
            f"the model's file {file} has {weights} of the type {types[strange[0]]}, such as "
            f"{strange[0]}, and no quantization_config in config.json says which numbers they stand for; download or "
            "save the model again in bfloat16, float16 or float32"
        )
