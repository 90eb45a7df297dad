"""Finds a model's folder: the built-in model, a local folder, or a model of the Hugging Face Hub."""

import json
import logging
import os
import re
from pathlib import Path

from whet.base.errors import ConfigError, WhetError
from whet.base.extras import require
from whet.base.files import expanded
from whet.fetch import smollm2
from whet.fetch.adapter import base_of, is_adapter, merged_folder
from whet.fetch.artifacts import PREFIX, artifact_folder
from whet.fetch.megatron import checkpoint_in, converted_folder
from whet.fetch.model_files import check_files

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_PROBE_SECONDS = 5.0
_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def absolute_path(path: str) -> str:
    """Return a folder or the folder of an artifact as an absolute path, because a run may be resumed or exported from
    another working folder; other names unchanged. For the validators of settings: raises ``ValueError``."""
    try:
        folder = _local(path)
    except WhetError as error:
        raise ValueError(str(error)) from None
    return str(folder.resolve()) if folder.is_dir() else path


def _local(path: str) -> Path:
    """Return the folder of that name, which may not exist. Raises ``WhetError`` if it can't be read."""
    folder = artifact_folder(path) if path.startswith(PREFIX) else expanded(path)
    try:
        folder.is_dir()
        (folder / "config.json").is_file()
    except OSError as error:
        raise WhetError(f"model {path!r} can't be read: {error.strerror}") from None
    return folder


def fetch_model(path: str, revision: str | None = None, *, with_code: bool = False, with_weights: bool = True) -> Path:
    """Return the local folder of the model ``path``; downloads, merges or converts it if needed. ``with_code`` also
    downloads Python files; without ``with_weights`` only config and tokenizer files are downloaded.

    Raises ``WhetError`` if there is no such folder or Hub id, or the Hub can't be reached within a few seconds.
    """
    check_model(path)
    if path == smollm2.NAME:
        return smollm2.smollm2_folder()
    folder = _local(path)
    if not folder.is_dir():
        code, weights = ["*.py"] if with_code else [], ["*.safetensors", "*.txt", "*.model", "*.jinja"]
        folder = _download(path, revision, ["*.json", *code, *(weights if with_weights else [])])
    check_files(folder, with_weights)
    if not is_adapter(folder):
        checkpoint = checkpoint_in(folder) if with_weights and not any(folder.glob("*.safetensors")) else None
        return folder if checkpoint is None else converted_folder(folder, checkpoint)
    base = fetch_model(*base_of(folder), with_code=with_code, with_weights=with_weights)
    return merged_folder(folder, base) if with_weights else base


def check_model(path: str) -> None:
    """Raise ``ConfigError`` if there is no such model, and ``WhetError`` if one of its files can't be read or the
    built-in one isn't installed. Uses no network."""
    folder = _local(path)
    if path == smollm2.NAME:
        smollm2.check_available()
    elif folder.is_dir():
        check_files(folder)
        if is_adapter(folder):
            require("lora", f"the adapter {folder}", "peft")
            check_model(base_of(folder)[0])
        elif not (folder / "config.json").is_file():
            if checkpoint_in(folder) is not None:
                raise ConfigError(
                    f"{folder} is a checkpoint of Megatron Core, which has no config.json; copy config.json and the "
                    "tokenizer's files of the Hugging Face model into it"
                )
            if any(folder.glob("*.gguf")):
                raise ConfigError(f"{folder} holds a model as GGUF, which is for llama.cpp; name one in safetensors")
            if (folder / "checkpoints").is_dir() and (folder / "recipe.yaml").is_file():
                raise ConfigError(
                    f"{folder} is the folder of a run; write its model with whet export {folder} --out FOLDER, and "
                    "name that folder"
                )
            raise ConfigError(f"model folder {folder} has no config.json; name the folder with the model's files")
    elif not _HUB_ID.fullmatch(path):
        raise ConfigError(
            f"model {path!r}: there is no such folder. Give {smollm2.NAME!r}, a folder with config.json and "
            "*.safetensors, or a Hugging Face Hub id such as 'Qwen/Qwen3-0.6B'"
        )


def generates_text(path: str) -> bool:
    """Return whether a model that is here already is a language model and no classifier, by its ``config.json``."""
    if path == smollm2.NAME:
        return True
    try:
        config = json.loads((_local(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    names = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(names, list) and any(str(name).endswith(_LANGUAGE_MODELS) for name in names)


def _download(path: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(
            path,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            local_files_only=not _hub_answers(),
            etag_timeout=_PROBE_SECONDS,
        )
    except LocalEntryNotFoundError as error:
        raise WhetError(
            f"model {path!r} is neither a folder here nor in the Hugging Face cache, and the Hub can't be reached. "
            f"Give a folder, use the built-in {smollm2.NAME!r}, or download it where there is a network"
        ) from error
    except RepositoryNotFoundError as error:
        raise WhetError(
            f"model {path!r}: neither a folder here nor a model on the Hugging Face Hub that you may read. "
            "Check the spelling; for a gated model run `hf auth login`"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise WhetError(f"model {path!r}: the download from the Hugging Face Hub failed: {error}") from error
    return Path(folder)


def _hub_answers() -> bool:
    """Return whether the Hub can be reached: one request with a deadline, because its client retries for minutes."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") == "1":
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception as error:
        log.info("the Hugging Face Hub doesn't answer (%s); using what is cached", error)
        return False
    return True
