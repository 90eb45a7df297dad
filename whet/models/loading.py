"""Loading of a Hugging Face model, its tokenizer and its config. Only safetensors weights are read.

A ``ModelConfig`` is resolved once to a local folder (the built-in model is converted, a Hub id is downloaded); all
files are then read from that folder, so later steps never wait for a network.
"""

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whet.base.errors import WhetError
from whet.base.extras import extra
from whet.base.files import write_atomically
from whet.base.memory import lack_of_memory
from whet.base.seeds import derive_seed
from whet.fetch.model import fetch_model
from whet.models.config import LoraSettings, ModelConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from whet.models.image_processor import ImageProcessor

log = logging.getLogger(__name__)

_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "experts", "w1", "w2", "w3"}


def resolve(config: ModelConfig) -> Path:
    """Return the local folder of the model, converted or downloaded if necessary. Raises ``WhetError`` if that
    fails."""
    return fetch_model(config.path, config.revision, with_code=config.trust_remote_code)


def fingerprint(config: ModelConfig) -> str:
    """Return a hash of the contents of the model's config and weight files, and of how they are quantized."""
    folder = resolve(config)
    content = hashlib.blake2b(digest_size=16)
    if _quantizes(config):
        content.update(b"nf4")
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as file:
            content.update(hashlib.file_digest(file, "blake2b").digest())
    return content.hexdigest()


def load_model_config(config: ModelConfig) -> "PretrainedConfig":
    """Return the Hugging Face config alone; for a Hub id no weights are downloaded."""
    from transformers import AutoConfig

    folder = fetch_model(config.path, config.revision, with_code=config.trust_remote_code, with_weights=False)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a wrong config.json makes transformers raise many types of errors
        raise _cannot_load(folder, error) from error


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Return the tokenizer. Raises ``WhetError`` if the folder has none."""
    from transformers import AutoTokenizer

    folder = resolve(config)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code
        )
        if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # what some families make of a missing file
            raise ValueError("its vocabulary is empty")
        return tokenizer
    except Exception as error:  # a wrong tokenizer.json makes the libraries raise many types of errors
        raise _no_tokenizer(folder, error) from error


def load_images(config: ModelConfig) -> "ImageProcessor":
    """Return the model's processor of images, the same object for each call in this process. Raises ``WhetError`` if
    it has none."""
    return _images_in(resolve(config), config.trust_remote_code)


@lru_cache(maxsize=4)
def _images_in(folder: Path, trust_remote_code: bool) -> "ImageProcessor":
    from whet.models.image_processor import ImageProcessor

    return ImageProcessor.of(
        folder, load_model_config(ModelConfig(path=str(folder), trust_remote_code=trust_remote_code))
    )


def save_processor(model: Path, folder: Path) -> None:
    """Write the processor of images of the model in a folder to another one, without a chat template, which is the
    tokenizer's."""
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        path = model / name
        if path.exists():
            settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            settings.pop("chat_template", None)
            write_atomically(folder / name, json.dumps(settings, indent=2) + "\n")


def architecture(vision: bool) -> "type[PreTrainedModel]":
    """Return the automatic class of transformers that builds a model, with its vision tower or of its text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if vision else AutoModelForCausalLM


def new_model(config: "PretrainedConfig", dtype: torch.dtype, vision: bool, **settings: Any) -> "PreTrainedModel":
    """Return a model of a Hugging Face config, whose weights are not read. Raises ``WhetError`` for a config that
    makes none."""
    _check_kind(config, vision)
    model: PreTrainedModel
    try:
        model = architecture(vision).from_config(config, dtype=dtype, **settings)
    except Exception as error:  # a wrong config.json makes transformers raise many types of errors
        if lack_of_memory(error) is not None:
            raise
        raise _cannot_load(Path(config.name_or_path), error) from error
    return model


def load_model(
    config: ModelConfig, *, dtype: torch.dtype, train: bool = True, seed: int = 0, empty: bool = False
) -> "PreTrainedModel | PeftModel":
    """Load the model onto the CPU, select forest attention (if its architecture supports it) and check its head.

    With ``train`` false no parameter requires a gradient, dropout is off, and LoRA adapters are left out: this is the
    reference model. With ``lora.quantize`` linear layers are in 4 bits, in either case. ``seed`` determines new
    adapters. ``empty`` gives the same on the device ``meta``, without weights.
    Raises ``WhetError`` if weights or architecture are not suitable.
    """
    from whet.models.families import select_attention
    from whet.models.head import check_head
    from whet.models.images import freeze_tower
    from whet.models.moe.experts import use_grouped_experts
    from whet.models.quantized import quantize

    model = _empty(config, dtype) if empty else _with_weights(config, dtype)
    if _quantizes(config):
        quantize(model, dtype)
    use_grouped_experts(model)
    images = None if config.vision is None else load_images(config)
    if not select_attention(model, images, check=not empty):
        log.warning("%s has layers whose state can't be copied: prompts are computed once per answer", config.path)
    if not empty:
        check_head(model)
    if config.vision == "frozen":
        freeze_tower(model)
    if config.lora is not None and train:
        model = _with_lora(model, config.lora, seed)
    if not train:
        model.requires_grad_(False)
    return model.train(train)


def _with_weights(config: ModelConfig, dtype: torch.dtype) -> "PreTrainedModel":
    from transformers.utils.logging import disable_progress_bar

    folder = resolve(config)
    if not any(folder.glob("*.safetensors")):
        raise WhetError(
            f"model folder {folder} has no *.safetensors file; other weight formats can run code when loaded"
        )
    disable_progress_bar()
    _check_kind(load_model_config(config), config.vision is not None)
    try:
        model, info = architecture(config.vision is not None).from_pretrained(
            folder,
            dtype="auto" if _quantizes(config) else dtype,  # as in the files; the layers are quantized next
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # damaged files raise errors of several libraries
        if lack_of_memory(error) is not None:
            raise
        raise _cannot_load(folder, error) from error
    if quantized := sorted({str(p.dtype) for p in model.parameters() if p.dtype not in _PLAIN}):
        raise WhetError(
            f"the model in {folder} is quantized, as the quantization_config in its config.json says: weights of "
            f"{', '.join(quantized)} can't be trained or scored here. Use the model that it was made from; "
            "model.lora.quantize=nf4 quantizes that one while it loads"
        )
    if missing := sorted(info["missing_keys"]):
        raise WhetError(
            f"model folder {folder}: its *.safetensors files lack {len(missing)} of the weights that its config.json "
            f"asks for, such as {', '.join(missing[:3])}; they would start from random numbers. Download or export the "
            "model again, or fix config.json"
        )
    return model


def _quantizes(config: ModelConfig) -> bool:
    return config.lora is not None and config.lora.quantize is not None


def _cannot_load(folder: Path, error: Exception) -> WhetError:
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{first} {more[0]}" if first.endswith(":") and more else first
    if "ignore_mismatched_sizes" in text:
        text = "the weights in its files have other shapes than its config.json asks for, as the report above shows"
    return WhetError(f"the model in {folder} can't be loaded: {type(error).__name__}: {text}")


def _no_tokenizer(folder: Path, error: Exception) -> WhetError:
    why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        why = "it has no tokenizer.json; copy the tokenizer's files to the model's, or download the model again"
    return WhetError(f"no tokenizer could be read from the model's folder {folder}: {why}")


def _check_kind(config: "PretrainedConfig", vision: bool) -> None:
    """Raise ``WhetError`` for a classifier, whose head would be left out, and for a model of images and texts that is
    to be loaded as a model of texts, although it has no such part."""
    from transformers.models.auto import modeling_auto

    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        raise WhetError(
            f"the model in {config.name_or_path} is a reward model or another classifier, whose head would be left "
            "out: start from the language model that it was made from, with all rows. To train a reward model of whet "
            "longer on the same rows, resume its run, as in `whet resume RUN steps=200`"
        )
    of_images = type(config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not vision and of_images and type(config) not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise WhetError(
            f"the model in {config.name_or_path} ({config.model_type}) reads images as well: set model.vision to "
            "frozen or trained"
        )


def _empty(config: ModelConfig, dtype: torch.dtype) -> "PreTrainedModel":
    with torch.device("meta"):
        loaded = load_model_config(config)
        return new_model(loaded, dtype, config.vision is not None, trust_remote_code=config.trust_remote_code)


def _with_lora(model: "PreTrainedModel", lora: LoraSettings, seed: int) -> "PeftModel":
    with extra("lora", "model.lora"):
        from peft import LoraConfig, get_peft_model

    from whet.models.attention.forest import decoder_of
    from whet.models.images import outside_decoder

    settings: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    settings |= {"use_rslora": lora.rank_stabilized, "use_dora": lora.dora}
    targets = lora_targets(model, lora)
    if outside := outside_decoder(model, decoder_of(model)):
        settings["exclude_modules"] = outside  # images are read as the base model reads them
    if lora.experts:
        from whet.models.moe.expert_lora import expert_parameters

        settings["target_parameters"] = expert_parameters(model)
        if not settings["target_parameters"]:
            raise WhetError(f"model.lora.experts = true, but {type(model).__name__} has no experts; leave it out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("lora", seed))
        try:
            adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **settings))
        except ValueError as error:  # no target, or a module that LoRA can't adapt
            raise WhetError(f"model.lora: {' '.join(str(error).split())}") from error
    if lora.experts:
        from whet.models.moe.expert_lora import take_over

        take_over(adapted)
    if lora.dora:
        from whet.models import dora

        dora.take_over(adapted)
    return adapted


def lora_targets(model: "PreTrainedModel", lora: LoraSettings) -> str | list[str]:
    """Return the layers that PEFT adapts. In a mixture of experts, "all-linear" means the linear layers whose names
    differ from the names of routed experts, which are adapted as parameters (``lora.experts``). Raises ``WhetError`` if
    one of ``target_modules`` names no module, or a layer of routed experts."""
    from whet.models.moe.experts import experts_of

    if not any(True for _ in experts_of(model)):
        return _found_targets(model, lora)
    if lora.target_modules == "all-linear":
        head = model.get_output_embeddings()
        linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
        return sorted({name.rpartition(".")[2] for name in linear} - _OF_EXPERTS)
    wrong = sorted(target for target in lora.target_modules if target.rpartition(".")[2] in _OF_EXPERTS)
    if wrong:
        raise WhetError(
            f"model.lora.target_modules: {', '.join(wrong)} are, or have the names of, layers of routed experts in "
            f"{type(model).__name__}, which model.lora.experts=true adapts; name layers of its attention, or use "
            "all-linear"
        )
    return _found_targets(model, lora)


def _found_targets(model: "PreTrainedModel", lora: LoraSettings) -> str | list[str]:
    """Return the target modules. Raises ``WhetError`` for a name that is the end of no module's name in the decoder:
    PEFT leaves it out if it finds others."""
    from whet.models.attention.forest import decoder_of
    from whet.models.images import outside_decoder

    if lora.target_modules == "all-linear":
        return lora.target_modules
    outside = set(outside_decoder(model, decoder_of(model)))
    modules = {f".{name}": module for name, module in model.named_modules() if name not in outside}
    for target in lora.target_modules:
        if not any(name.endswith(f".{target}") for name in modules):
            linear = {n.rpartition(".")[2] for n, module in modules.items() if isinstance(module, torch.nn.Linear)}
            raise WhetError(
                f"model.lora.target_modules: {target!r} is the end of no module's name in {type(model).__name__}; its "
                f"linear layers end in {', '.join(sorted(linear))}"
            )
    return lora.target_modules


def adapted_modules(config: ModelConfig) -> list[str]:
    """Return the names of the modules that LoRA adapts, for a generator. No weights are loaded. Raises ``WhetError`` if
    embeddings, the output matrix or routed experts are among them."""
    from peft.tuners.lora import LoraLayer

    model: Any = load_model(config, dtype=torch.float32, empty=True)
    plain: Any = model.get_base_model()
    if config.lora is not None and config.lora.experts:
        raise WhetError("model.lora.experts: an engine gets adapted experts merged; set weights.lora=merged")
    ends = (plain.get_input_embeddings(), plain.get_output_embeddings())
    adapted = {name: module for name, module in plain.named_modules() if isinstance(module, LoraLayer)}
    wrong = [name for name, module in adapted.items() if module in ends]
    if wrong:
        raise WhetError(
            f"model.lora.target_modules: {', '.join(wrong)} is the model's embeddings or output matrix, and a "
            "generator gets LoRA only of the layers between; adapt other modules"
        )
    return list(adapted)
