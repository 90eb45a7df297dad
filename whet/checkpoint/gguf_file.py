"""A model folder as a GGUF file, which llama.cpp and its relatives load: Llama, Qwen 2 and Qwen 3.

The package ``gguf`` names the tensors and writes the file, which also has the tokenizer and the chat template. One
tensor is in memory at a time. A model that llama.cpp would compute in another way is refused.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.base.progress import PROGRESS
from whet.base.strict_json import JsonObject
from whet.fetch.casting import check_range

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

GgufType = Literal["f32", "f16", "bf16", "q8_0"]
"""Types of the matrices in a file: floats, or 8-bit integers with a scale for each 32 of them."""

_FAMILIES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # model_type -> name in gguf

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The steps by which a tokenizer cuts text before it merges bytes -> llama.cpp's name of that.
_CUTS = {
    ("bytes of words",): "gpt-2",
    ("single digits", "bytes of words"): "smollm",
    (rf"{_WORDS}\p{{N}}{_OTHERS}", "bytes"): "qwen2",
    (rf"{_WORDS}\p{{N}}{{1,3}}{_OTHERS}", "bytes"): "llama-bpe",
}


class _Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    read: Callable[[], "Tensor"]


def check_gguf(config: "PretrainedConfig") -> None:
    """Raise ``ConfigError`` if a model with this Hugging Face config can't become a GGUF file."""
    kind, rope = config.model_type, config.rope_parameters or {}
    if kind not in _FAMILIES:
        raise ConfigError(
            f"GGUF files are written for {', '.join(_FAMILIES)}, and this model is {kind!r}; leave out --gguf"
        )
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        raise ConfigError(f"GGUF: rotary embeddings of type {rope['rope_type']!r} can't be written; leave out --gguf")
    if config.hidden_act != "silu":
        raise ConfigError(f"GGUF: llama.cpp computes {kind} models with silu, not {config.hidden_act!r}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(f"GGUF: this {kind} model has layers with a sliding window, which llama.cpp lacks there")


def write_gguf(folder: Path, out: Path, kind: GgufType, name: str) -> None:
    """Write the model of a Hugging Face folder to the file ``out``. ``kind`` is the type of matrices; vectors, and
    matrices whose rows don't divide into blocks, are more precise. Raises ``ConfigError`` for a model or a tokenizer
    that llama.cpp would read in another way."""
    with extra("quickstart", "an export as GGUF"):
        import gguf
    import numpy
    import torch
    from transformers import AutoConfig, AutoTokenizer

    config: Any = AutoConfig.from_pretrained(folder)
    check_gguf(config)
    architecture = gguf.MODEL_ARCH[_FAMILIES[config.model_type]]
    with closing(gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])) as writer:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
        _add_sizes(writer, config)
        _add_tokenizer(writer, AutoTokenizer.from_pretrained(folder), folder, config.vocab_size)
        entries = list(_entries(folder, config, architecture, gguf.GGMLQuantizationType[kind.upper()]))
        for entry in entries:
            block, size = gguf.GGML_QUANT_SIZES[entry.kind]
            count = math.prod(entry.shape) // block * size
            writer.add_tensor_info(entry.name, entry.shape, numpy.dtype(numpy.float32), count, entry.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        limits = {
            gguf.GGMLQuantizationType.F16: (torch.float16, 1),
            gguf.GGMLQuantizationType.BF16: (torch.bfloat16, 1),
            gguf.GGMLQuantizationType.Q8_0: (torch.float16, 127),
        }
        for entry in PROGRESS.each(entries, "tensors"):
            tensor = entry.read().float()
            if entry.kind in limits:
                check_range(entry.name, tensor, *limits[entry.kind])
            writer.write_tensor_data(gguf.quants.quantize(tensor.numpy(), entry.kind))


def _add_sizes(writer: "GGUFWriter", config: "PretrainedConfig") -> None:
    head = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _entries(folder: Path, config: "PretrainedConfig", architecture: object, kind: object) -> Iterator[_Entry]:
    import gguf
    from safetensors import safe_open

    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    rope = _rope_factors(config)
    if rope is not None:
        yield _Entry("rope_freqs.weight", tuple(rope.shape), gguf.GGMLQuantizationType.F32, lambda: rope)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        for key, shape in shapes.items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ConfigError(f"GGUF: llama.cpp has no {key} in {config.model_type} models; leave out --gguf")
            yield _Entry(name, shape, _kind_of(shape, kind), partial(_read, path, key, config))


def _kind_of(shape: tuple[int, ...], kind: object) -> object:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) < 2:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.F16 if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def _read(path: Path, key: str, config: "PretrainedConfig") -> "Tensor":
    """Return a tensor. llama.cpp rotates neighbouring rows of a Llama's heads together, transformers the two halves."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(key)
    module = key.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module)
    if config.model_type != "llama" or heads is None:
        return tensor
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _rope_factors(config: "PretrainedConfig") -> "Tensor | None":
    """Return the factors by which the rotations of ``llama3`` are slower than the usual ones."""
    if config.rope_parameters.get("rope_type", "default") == "default":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    slower, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = 2 * len(slower)
    usual = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return usual / slower


def _add_tokenizer(writer: "GGUFWriter", tokenizer: "PreTrainedTokenizerBase", folder: Path, size: int) -> None:
    from gguf import SpecialVocab, TokenType

    writer.add_tokenizer_model("gpt2")  # BPE over bytes
    writer.add_tokenizer_pre(_cut(folder / "tokenizer.json"))
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [TokenType.UNUSED] * size
    added = tokenizer.added_tokens_decoder
    for token, number in tokenizer.get_vocab().items():
        if number >= size:
            raise ConfigError(f"GGUF: token {token!r} has the id {number}, and the model only {size} rows")
        tokens[number], kinds[number] = token, TokenType.NORMAL
        if number in added:
            kinds[number] = TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = SpecialVocab(folder, load_merges=True, n_vocab=size)
    special.add_special_token.setdefault("bos", tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        special.chat_template = tokenizer.chat_template
    special.add_to_gguf(writer, quiet=True)


def _cut(path: Path) -> str:
    """Return llama.cpp's name of the way in which a tokenizer cuts text."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    pre = tokenizer["pre_tokenizer"] or {}
    steps = tuple(_step(step) for step in pre.get("pretokenizers", [pre]))
    if tokenizer["model"].get("byte_fallback") or tokenizer["model"]["type"] != "BPE" or steps not in _CUTS:
        raise ConfigError(
            f"GGUF: the tokenizer cuts text in a way that has no name here ({tokenizer['model']['type']}, "
            f"{', '.join(steps)}); the tokenizers of GPT-2, SmolLM, Qwen 2 and 3, and Llama 3 can be written"
        )
    return _CUTS[steps]


def _step(step: JsonObject) -> str:
    kind = step.get("type", "nothing")
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return "bytes of words" if step["use_regex"] else "bytes"
    if kind == "Digits" and step["individual_digits"]:
        return "single digits"
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex", step["pattern"]))
    return str(kind)
