"""Images in vLLM: what makes its models that read images work where videos can't be read, and a request's images in its
terms.

vLLM imports torchvision with such a model, for videos and its own scaling of images. PyPI has no torchvision that works
with torch for CPUs, so there the import gets stand-ins, which are never called: images are scaled by the processor that
the learner uses, in every process of the engine.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.base.errors import WhetError
from whet.engines.vllm.image_attention import install
from whet.fetch.images import open_image
from whet.models.image_processor import ImageProcessor, load_processor

READS = "WHET_ENGINE_READS"
"""The environment variable that is set in the processes of an engine that whet starts for a model that reads images."""
_PARTS = ("", ".io", ".transforms", ".transforms.v2", ".transforms.v2.functional")
_STOOD_IN_FOR = tuple(f"torchvision{part}" for part in _PARTS)
_GEMMA_3 = "Gemma3ForConditionalGeneration"
_LOOK_AHEAD = {_GEMMA_3, "Gemma4ForConditionalGeneration"}
_JOINS = ("_apply_token_matches", "_apply_token_matches_with_placeholders", "_find_mm_placeholders")
_CLASSES = {
    *_LOOK_AHEAD,
    "Idefics3ForConditionalGeneration",
    "InternS1ForConditionalGeneration",  # also of InternVL
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
}


def prepare() -> None:
    """Prepare this process for models that read images. vLLM calls it in all its processes, also of servers (an entry
    point of ``vllm.general_plugins``); more than one call is fine. Where torchvision is installed, it changes nothing
    in vLLM that whet has not started; elsewhere, nothing about other models than ``_CLASSES``."""
    import transformers.utils

    if READS in os.environ or not transformers.utils.is_torchvision_available():
        from vllm.model_executor.models import registry

        entries: Any = registry._LazyRegisteredModel
        entries.load_model_cls = _load


def _load(entry: Any) -> object:
    """Return the class of a model in vLLM's registry, ready to read images."""
    if entry.class_name not in _CLASSES:
        return getattr(import_module(entry.module_name), entry.class_name)
    with _stand_ins():
        model = getattr(import_module(entry.module_name), entry.class_name)
    from vllm.multimodal.processing.context import BaseProcessingInfo, InputProcessingContext
    from vllm.platforms import current_platform

    if entry.class_name == _GEMMA_3:
        _prepare_gemma_3(model)
    if entry.class_name in _LOOK_AHEAD and current_platform.is_cpu():
        install()
    context: Any = InputProcessingContext
    context.get_hf_processor = _processor
    info = model._processor_factory.info
    info.get_hf_processor = BaseProcessingInfo.get_hf_processor  # InternVL's adds a processor of videos
    info.supported_mm_limits = {"image": None}  # any number of them, and no videos
    info.supported_mm_processor_kwargs = property(BaseProcessingInfo.get_supported_mm_processor_kwargs)
    info.get_max_video_tokens = info.has_audio = _none  # has_audio: Gemma 4's, for which 0 is False
    return model


def _prepare_gemma_3(model: Any) -> None:
    from vllm.multimodal.processing import BaseMultiModalProcessor

    for name in _JOINS:  # line breaks around an image with the text's, which the learner doesn't do
        setattr(model._processor_factory.processor, name, getattr(BaseMultiModalProcessor, name))
    for part in ("embeddings", "encoder", "post_layernorm"):  # transformers 5 writes them without vision_model
        model.hf_to_vllm_mapper.orig_to_new_prefix[f"vision_tower.{part}."] = f"vision_tower.vision_model.{part}."


def _none(*_: object) -> int:
    return 0


def image_inputs(prompt: Sequence[int], urls: Sequence[str], images: ImageProcessor) -> dict[str, object]:
    """Return a prompt with images as vLLM's: it replaces each mark of an image by its tokens, as the processor does.
    ``urls``: the images that the prompt may have."""
    tokens, order = images.folded(prompt, urls)
    pictures = [open_image(url).convert("RGB") for url in order]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": pictures}}


def _processor(context: Any, *_: object, **__: object) -> object:
    """Return the processor of an engine's model, without its parts for videos and audio."""
    return _processor_in(context.model_config.model)


@lru_cache(maxsize=8)
def _processor_in(folder: str) -> object:
    from transformers import AutoConfig

    return load_processor(Path(folder), AutoConfig.from_pretrained(folder))


class _Anything(type):
    """The class of a class that has all attributes, each of which is itself."""

    def __getattr__(cls, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _StandIn(metaclass=_Anything):
    """Stands for every name of a module that can't be imported."""

    def __init__(self, *_: object, **__: object) -> None:
        raise WhetError(
            "vLLM calls torchvision, which is not installed: it needs it to read videos, or to scale images as another "
            "processor than the learner's does; sample with generator=torch"
        )


class _Module(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Let imports of torchvision succeed, if it is not installed."""
    import transformers.utils

    if transformers.utils.is_torchvision_available():  # which is remembered
        yield
        return
    for name in _STOOD_IN_FOR:
        module = _Module(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in _STOOD_IN_FOR:
            del sys.modules[name]
