"""The class of a sequence classifier of an architecture: a model with a linear map ``score`` from the hidden state of
the last token that isn't padding. Where transformers has none, its own parts make one, as they make the classes that it
has; so such a checkpoint has the names of weights that transformers would give it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.models.families import PICTURE
from whet.models.image_processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def classifier_class(config: "PretrainedConfig") -> "type[PreTrainedModel]":
    """Return the class for a model's config. Raises ``ValueError`` for an architecture without a decoder."""
    from transformers import AutoModel
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    kind = type(config)
    classifier: type[PreTrainedModel] | None = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(kind, None)
    if classifier is not None:
        return classifier
    base: type[Any] | None = AutoModel._model_mapping.get(kind, None)
    generates = kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if base is None or not generates or config.is_encoder_decoder or base.can_generate():
        raise ValueError(f"transformers has no sequence classifier of {kind.__name__}, and no decoder to make one of")
    name = base.__name__.removesuffix("Model") + "ForSequenceClassification"
    made: type[PreTrainedModel] = type(name, (GenericForSequenceClassification, family_class(base)), {})
    return made


def family_class(model: "type[PreTrainedModel]") -> "type[PreTrainedModel]":
    """Return the class that the models of a family have in common, such as ``Qwen3VLPreTrainedModel``."""
    from transformers import PreTrainedModel

    return next(kind for kind in model.__mro__ if PreTrainedModel in kind.__bases__)


def in_transformers(config: "PretrainedConfig") -> bool:
    """Return whether transformers has the class for a model's config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    return type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def reads_images(config: "PretrainedConfig") -> bool:
    """Return whether a model's config has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def trial_rows(config: "PretrainedConfig", images: ImageProcessor | None) -> list[list[int]]:
    """Return tokens on which a classifier is tried: a few, and with a processor of ``images`` also a picture's. The
    last one is not padding."""
    text = config.get_text_config()
    tokens = [token % text.vocab_size for token in (1, 2, 3) if token % text.vocab_size != text.pad_token_id]
    return [tokens] if images is None else [tokens, [*tokens, *images.tokens(PICTURE), *tokens]]


def arguments_of(row: Sequence[int], images: ImageProcessor | None) -> dict[str, Tensor]:
    """Return the arguments of transformers' own code for a row of ``trial_rows``."""
    if images is None or min(row) >= 0:
        return {"input_ids": torch.tensor([row])}
    more = images.inputs(PICTURE) | images.kinds(PICTURE, row)
    return {"input_ids": torch.tensor([images.marked(row)]), **more}
